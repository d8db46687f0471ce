"""`/v1/completions` over a scripted engine, through the official client."""

import json

import openai
import pytest

from scheduler.request import Finish, Request
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.rig import ApiRig, script_of, spoken
from tests.cluster.api.sdk import of_completions
from tests.cluster.frontend.fake_engine import ANSWER
from tests.cluster.frontend.texts import TEXTS
from tests.cluster.frontend.tiny_tokenizers import FAMILIES, make_tokenizer


def last_request(rig: ApiRig) -> Request:
    """The newest request that the engine got."""
    found: Request | None = None
    while not rig.engine.received.empty():
        message = rig.engine.received.get()
        found = message if isinstance(message, Request) else found
    assert found is not None
    return found


def test_the_answer_has_every_field_that_the_client_reads(rig: ApiRig) -> None:
    answer = rig.openai().completions.create(model="tiny", prompt="hi", max_tokens=40)

    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.created > 1_700_000_000
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, ANSWER, "stop")
    assert choice.logprobs is None
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(rig.tokenizer.encode("hi"))
    num_output = len(rig.tokenizer.encode(ANSWER, add_special_tokens=False)) + 1
    assert usage.completion_tokens == num_output
    assert usage.total_tokens == usage.prompt_tokens + num_output
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [[None, "a"]]),
        (["a", "b"], [[None, "a"], [None, "b"]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["a", [7]], [[None, "a"], [7]]),
    ],
    ids=str,
)
def test_prompts_may_be_texts_ids_and_lists_of_both(
    rig: ApiRig, prompt: object, expected: list[list[object]]
) -> None:
    answer = rig.post("/v1/completions", prompt=prompt, max_tokens=1, return_token_ids=True).json()

    got = [choice["prompt_token_ids"] for choice in answer["choices"]]
    as_ids = [rig.tokenizer.encode(str(one[1])) if one[0] is None else one for one in expected]
    assert got == as_ids
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, as_ids))


def test_output_j_of_prompt_i_has_index_i_times_n_plus_j(rig: ApiRig) -> None:
    answer = rig.openai().completions.create(
        model="tiny", prompt=["a", "b"], n=2, max_tokens=2, extra_body={"return_token_ids": True}
    )

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    prompts = [choice.prompt_token_ids for choice in answer.choices]  # type: ignore[attr-defined]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2 * len(rig.tokenizer.encode("a"))
    assert answer.usage.completion_tokens == 8


SHAPES = [
    (1, False, None, False),
    (2, False, None, False),
    (1, True, None, False),
    (1, False, 0, False),
    (2, True, 3, False),
    (1, False, 3, True),
    (2, True, 0, True),
    (1, True, None, True),
]
"""n, echo, logprobs, return_token_ids"""


@pytest.mark.parametrize(("family", "per_step"), [*zip(FAMILIES, (1, 3, 2, 1), strict=True)])
def test_streams_and_whole_answers_agree_in_every_shape(
    start_rig: StartRig, family: str, per_step: int
) -> None:
    tokenizer = make_tokenizer(family)
    has_all_bytes = family in ("llama3_like", "unknown_decoder")
    text = " ".join(TEXTS)[:90] if has_all_bytes else ANSWER
    length = len(tokenizer.encode(text, add_special_tokens=False))
    rig = start_rig(
        script=script_of(tokenizer, text, per_step=per_step),
        files=FAMILIES[family](),
        info=None,
    )
    client = rig.openai()
    for n, echo, logprobs, ids in SHAPES:
        asked = {
            "model": "tiny",
            "prompt": "hi",
            "n": n,
            "echo": echo,
            "logprobs": logprobs,
            "max_tokens": min(length + 1, 60),
            "extra_body": {"return_token_ids": ids},
        }
        whole = client.completions.create(**asked)  # type: ignore[call-overload]
        chunks = client.completions.create(**asked, stream=True)  # type: ignore[call-overload]

        told = of_completions([whole])
        assert of_completions(chunks) == told
        assert len(told) == n
        for one in told.values():
            joined = b"".join(_bytes_of(entry[0]) for entry in one.logprobs)  # type: ignore[index]
            if logprobs is not None and not ids and not (echo and tokenizer.bos_token_id):
                assert joined.decode(errors="replace") == one.text


def _bytes_of(token: str) -> bytes:
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))


def test_usage_comes_in_a_last_chunk_without_choices_if_asked_for(rig: ApiRig) -> None:
    asked = {"model": "tiny", "prompt": "hi", "max_tokens": 5}
    whole = rig.post("/v1/completions", **asked).json()

    def chunks(**options: object) -> list[dict[str, object]]:
        body = {**asked, "stream": True, **options}
        lines = rig.post("/v1/completions", **body).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    with_usage = chunks(stream_options={"include_usage": True})
    assert with_usage[-1]["choices"] == []
    assert with_usage[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in with_usage[:-1])
    assert all("usage" not in chunk for chunk in chunks())
    assert all("usage" not in chunk for chunk in chunks(stream_options={"include_usage": False}))
    always = chunks(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in always]  # type: ignore[index]
    assert counts == sorted(counts)
    assert counts[-1] == whole["usage"]["completion_tokens"]


def test_best_of_gives_the_likeliest_outputs_per_token(start_rig: StartRig) -> None:
    words = [" the", " the quick brown", " the quick"]

    def script(request: Request) -> object:
        index = (request.handle - 1) % 3
        ids = tokenizer.encode(words[index], add_special_tokens=False)
        return spoken(request, ids, finish=Finish.LENGTH)

    tokenizer = make_tokenizer("llama3_like")
    rig = start_rig(script=script)
    answer = rig.openai().completions.create(model="tiny", prompt="hi", n=2, best_of=3)

    # Later tokens are scripted to be less likely, so shorter outputs are better.
    assert [choice.text for choice in answer.choices] == [" the", " the quick"]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.logprobs for choice in answer.choices] == [None, None]
    assert answer.usage is not None
    total = sum(len(tokenizer.encode(word, add_special_tokens=False)) for word in words)
    assert answer.usage.completion_tokens == total


def test_an_echoed_prompt_with_no_tokens_to_make_is_scored(rig: ApiRig) -> None:
    asked = {"prompt": "the quick", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = rig.post("/v1/completions", **asked).json()

    (choice,) = answer["choices"]
    ids = rig.tokenizer.encode("the quick")
    logprobs = choice["logprobs"]
    assert choice["text"] == "the quick"
    assert choice["finish_reason"] == "length"
    assert logprobs["token_logprobs"] == [None, *(-float(i + 1) for i in range(1, len(ids)))]
    assert logprobs["tokens"] == [rig.tokenizer.token_text(token_id) for token_id in ids]
    assert logprobs["text_offset"][:2] == [0, 0]  # the begin token has no text of the prompt's
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["top_logprobs"][1]) == 2
    assert answer["usage"]["completion_tokens"] == 0
    assert last_request(rig).sampling.prompt_logprobs == 1
    streamed = rig.openai().completions.create(model="tiny", stream=True, **asked)  # type: ignore[call-overload]
    assert [(part.choices[0].text, part.choices[0].finish_reason) for part in streamed] == [
        ("the quick", "length")
    ]


def test_echo_shows_ids_as_the_text_they_stand_for(rig: ApiRig) -> None:
    ids = rig.tokenizer.encode("hello<|im_end|>")
    answer = rig.openai().completions.create(model="tiny", prompt=ids, echo=True, max_tokens=1)

    assert answer.choices[0].text.startswith("<|begin|>hello<|im_end|> the")


def test_only_the_end_of_a_long_prompt_is_kept_if_asked_for(rig: ApiRig) -> None:
    ids = list(range(10, 110))

    def kept(limit: int, **fields: object) -> list[int]:
        asked = {"truncate_prompt_tokens": limit, "max_tokens": 4, **fields}
        answer = rig.post("/v1/completions", prompt=ids, return_token_ids=True, **asked)
        found: list[int] = answer.json()["choices"][0]["prompt_token_ids"]
        return found

    assert kept(3) == ids[-3:]
    assert kept(-1) == ids[-60:]
    assert rig.post("/v1/completions", prompt=ids).status_code == 400


FIELDS: dict[str, object] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 1.0,
    "seed": 5,
    "max_tokens": 9,
    "min_tokens": 3,
    "stop_token_ids": (3, 4),
    "ignore_eos": True,
    "allowed_token_ids": (5, 6),
    "logprobs": 2,
    "prompt_logprobs": 3,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
}


def test_every_sampling_field_reaches_the_engine(rig: ApiRig) -> None:
    rig.post("/v1/completions", prompt="hi", logit_bias={"7": 2}, **FIELDS)

    request = last_request(rig)
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in FIELDS} == FIELDS
    assert sampling.logit_bias == {7: 2.0}
    rig.post("/v1/completions", prompt="hi", bad_words=["dog"], cache_salt="a", timeout=7)
    request = last_request(rig)
    assert request.sampling.bad_word_ids
    assert (request.cache_salt, request.timeout_s) == ("a", 7.0)


def test_a_field_left_out_is_taken_from_the_model_and_then_from_us(start_rig: StartRig) -> None:
    from cluster.messages.clients import GenerationDefaults
    from tests.cluster.frontend.fake_engine import make_info

    defaults = GenerationDefaults(temperature=0.25, top_k=3, max_tokens=11)
    script = script_of(make_tokenizer("llama3_like"), ANSWER)
    rig = start_rig(script=script, info=make_info(defaults=defaults))

    rig.post("/v1/completions", prompt="hi", top_k=None, temperature=0.75)
    sampling = last_request(rig).sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.75, 3, 11)
    assert sampling.top_p == 1.0
    chat = [{"role": "user", "content": "hi"}]
    rig.post("/v1/chat/completions", messages=chat, max_completion_tokens=5, top_k=-1)
    sampling = last_request(rig).sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.25, 0, 5)


def test_a_timeout_may_come_as_a_header_and_the_field_wins(rig: ApiRig) -> None:
    headers = {"X-Request-Timeout": "2.5"}
    rig.http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert last_request(rig).timeout_s == 2.5
    rig.http.post("/v1/completions", json={"prompt": "hi", "timeout": 1}, headers=headers)
    assert last_request(rig).timeout_s == 1.0
    refused = rig.http.post(
        "/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Timeout": "soon"}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "X-Request-Timeout"


def test_a_server_wide_timeout_holds_where_a_call_names_none(start_rig: StartRig) -> None:
    script = script_of(make_tokenizer("llama3_like"), ANSWER)
    rig = start_rig(script=script, default_timeout_s=9.0)
    rig.post("/v1/completions", prompt="hi")
    assert last_request(rig).timeout_s == 9.0
    rig.post("/v1/completions", prompt="hi", timeout=3)
    assert last_request(rig).timeout_s == 3.0


STOPS = [" fox", [" fox"], [*map(str, range(11)), " fox"], None, []]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_stop_is_a_text_a_list_null_or_empty(rig: ApiRig, stop: object, stream: bool) -> None:
    parts = rig.openai().completions.create(  # type: ignore[call-overload]
        model="tiny", prompt="hi", stop=stop, max_tokens=40, stream=stream
    )
    (told,) = of_completions(parts if stream else [parts]).values()

    assert told.text == (" the quick brown" if stop else ANSWER)
    assert told.stop_reason == (" fox" if stop else None)
    assert told.finish_reason == "stop"


def test_a_stopped_output_has_entries_for_its_text_alone(rig: ApiRig) -> None:
    asked = {"model": "tiny", "prompt": "hi", "max_tokens": 40, "logprobs": 0, "stop": " fox"}
    client = rig.openai()
    whole = of_completions([client.completions.create(**asked)])  # type: ignore[call-overload]
    chunks = of_completions(client.completions.create(**asked, stream=True))  # type: ignore[call-overload]

    assert whole == chunks
    assert "".join(entry[0] for entry in whole[0].logprobs) == " the quick brown"  # type: ignore[index]


def test_a_model_without_tokenizer_takes_and_gives_ids(start_rig: StartRig) -> None:
    from tests.cluster.frontend.fake_engine import make_info

    def script(request: Request) -> object:
        return spoken(request, [7, 8], finish=Finish.LENGTH)

    rig = start_rig(script=script, info=make_info(tokenizer_digest=""))
    answer = rig.post(
        "/v1/completions", prompt=[5], max_tokens=2, logprobs=0, return_token_ids=True
    ).json()
    assert answer["choices"][0]["token_ids"] == [7, 8]
    assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:7", "token_id:8"]
    for path, body in (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"prompt": "hi"}),
    ):
        refused = rig.post(path, **body)
        assert refused.status_code == 400
        assert "no tokenizer" in refused.json()["error"]["message"]


@pytest.mark.parametrize("value", ["tiny", "alias", None])
def test_every_alias_answers_under_its_own_name(start_rig: StartRig, value: str | None) -> None:
    script = script_of(make_tokenizer("llama3_like"), ANSWER)
    rig = start_rig(script=script, served_model_names=("tiny", "alias"))
    answer = rig.post("/v1/completions", prompt="hi", model=value).json()
    assert answer["model"] == (value or "tiny")
    chat = rig.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], model=value
    )
    assert chat.json()["model"] == (value or "tiny")
    with pytest.raises(openai.NotFoundError, match="tiny, alias"):
        rig.openai().completions.create(model="other", prompt="hi")
