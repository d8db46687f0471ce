"""The official client, sync and async, streaming and not, on both routes of the real model."""

import asyncio
from collections.abc import Mapping

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.cluster.api.sdk import Told, of_chat, of_chat_chunks, of_completions
from tests.system.api.serving import WAIT_S, Serving

pytestmark = pytest.mark.model

ASKS: dict[str, dict[str, object]] = {
    "plain": {"temperature": 0},
    "two seeded outputs": {"n": 2, "seed": 3, "temperature": 0.9, "top_p": 0.9},
    "log-probabilities": {"temperature": 0, "logprobs": 3},
    "a stop text": {"temperature": 0, "stop": ["e", "\n\n"], "max_tokens": 10, "logprobs": 0},
    "penalties": {
        "seed": 1,
        "presence_penalty": 1.0,
        "frequency_penalty": -0.5,
        "logit_bias": {"28": -100, "30": 5},
        "user": "me",
        "extra_body": {"metadata": {"a": "b"}, "store": False},
    },
    "extras": {
        "seed": 2,
        "extra_body": {
            "top_k": 20,
            "min_p": 0.01,
            "repetition_penalty": 1.2,
            "min_tokens": 4,
            "ignore_eos": True,
            "bad_words": ["the"],
            "stop_token_ids": [0],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "timeout": 60,
            "cache_salt": "s",
            "priority": 0,
        },
    },
    "few tokens": {"seed": 2, "extra_body": {"allowed_token_ids": [28, 30, 198, 260]}},
}
MESSAGES = [
    {"role": "system", "content": "You like emoji."},
    {"role": "user", "content": "Say hello in French, Japanese and emoji."},
]


def completion_ask(ask: Mapping[str, object]) -> dict[str, object]:
    return {"model": None, "prompt": "The three colours are", "max_tokens": 5, **ask}


def chat_ask(ask: Mapping[str, object]) -> dict[str, object]:
    asked: dict[str, object] = {"model": None, "messages": MESSAGES, "max_tokens": 5, **ask}
    if "logprobs" in asked:
        asked |= {"logprobs": True, "top_logprobs": asked["logprobs"]}
    asked["max_completion_tokens"] = asked.pop("max_tokens")
    return asked


Both = tuple[dict[int, Told], dict[int, Told]]
"""A whole answer, and a stream."""


async def asynchronously(
    served: Serving, asks: Mapping[str, Mapping[str, object]]
) -> dict[str, tuple[Both, Both]]:
    """Completion and chat of each of the asks, all at once."""

    async def of_completion(ask: Mapping[str, object]) -> Both:
        asked = completion_ask(ask)
        whole = await client.completions.create(**asked)  # type: ignore[call-overload]
        stream = await client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
        return of_completions([whole]), of_completions([chunk async for chunk in stream])

    async def of_conversation(ask: Mapping[str, object]) -> Both:
        asked = chat_ask(ask)
        whole = await client.chat.completions.create(**asked)  # type: ignore[call-overload]
        stream = await client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
        return of_chat(whole), of_chat_chunks([chunk async for chunk in stream])

    async with openai.AsyncOpenAI(
        base_url=f"{served.base_url}/v1", api_key=served.api_key, max_retries=0, timeout=WAIT_S
    ) as client:
        answers = await asyncio.gather(
            *map(of_completion, asks.values()), *map(of_conversation, asks.values())
        )
    half = len(asks)
    return dict(zip(asks, zip(answers[:half], answers[half:], strict=True), strict=True))


def test_streams_and_whole_answers_agree_to_the_byte_and_so_do_both_clients(
    served: Serving, http: httpx.Client
) -> None:
    answers = asyncio.run(asynchronously(served, ASKS))
    for name, (completion, chat) in answers.items():
        assert completion[0] == completion[1], name
        assert chat[0] == chat[1], name
        assert all(one.text for one in (*completion[0].values(), *chat[0].values()))
    name = "log-probabilities"
    with served.sdk() as client:
        asked = completion_ask(ASKS[name])
        whole = client.completions.create(**asked)  # type: ignore[call-overload]
        chunks = client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
        assert (of_completions([whole]), of_completions(chunks)) == answers[name][0]
        asked = chat_ask(ASKS[name])
        whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
        chunks = client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
        assert (of_chat(whole), of_chat_chunks(chunks)) == answers[name][1]


def test_answers_and_chunks_are_what_the_clients_types_say(http: httpx.Client) -> None:
    """The client itself builds its types without looking; here they are checked."""
    asked = {"n": 2, "max_tokens": 3, "seed": 1}
    completion = {**asked, "prompt": "Hi", "logprobs": 2}
    chat = {**asked, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    Completion.model_validate(http.post("/v1/completions", json=completion).json())
    ChatCompletion.model_validate(http.post("/v1/chat/completions", json=chat).json())
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    for route, body, kind in (
        ("/v1/completions", completion, Completion),
        ("/v1/chat/completions", chat, ChatCompletionChunk),
    ):
        events = http.post(route, json={**body, **streams}).text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        for event in events[:-2]:
            # Completion chunks that go on have no finish_reason, which that type does not foresee.
            text = event.removeprefix("data: ")
            if kind is Completion:
                text = text.replace('"finish_reason":null', '"finish_reason":"stop"')
            kind.model_validate_json(text)


def test_usage_is_the_same_whether_streamed_or_not(served: Serving, http: httpx.Client) -> None:
    asked = chat_ask({"temperature": 0, "extra_body": {"cache_salt": "usage"}})
    with served.sdk() as client:
        first = client.chat.completions.create(**asked)  # type: ignore[call-overload]
        second = client.chat.completions.create(**asked)  # type: ignore[call-overload]
        *others, last = client.chat.completions.create(  # type: ignore[call-overload]
            **asked, stream=True, stream_options={"include_usage": True}
        )
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    whole_blocks = (first.usage.prompt_tokens - 1) // 16 * 16
    assert second.usage.prompt_tokens_details.cached_tokens == whole_blocks > 0
    assert last.choices == []
    assert last.usage == second.usage
    assert all(chunk.usage is None for chunk in others)


WRONG: list[tuple[str, dict[str, object], type[openai.APIStatusError], str | None]] = [
    ("/completions", {"prompt": ""}, openai.BadRequestError, "prompt"),
    ("/completions", {"prompt": []}, openai.BadRequestError, "prompt"),
    ("/completions", {"prompt": [""]}, openai.BadRequestError, "prompt"),
    ("/completions", {"prompt": [[]]}, openai.BadRequestError, "prompt"),
    ("/completions", {"prompt": "a " * 3000}, openai.BadRequestError, "prompt"),
    ("/completions", {"prompt": [49152]}, openai.BadRequestError, "prompt"),
    ("/completions", {"prompt": "a", "suffix": "b"}, openai.BadRequestError, "suffix"),
    ("/completions", {"prompt": "a", "temperature": -1}, openai.BadRequestError, "temperature"),
    ("/completions", {"prompt": "a", "top_p": 2}, openai.BadRequestError, "top_p"),
    ("/completions", {"prompt": "a", "n": 0}, openai.BadRequestError, "n"),
    ("/completions", {"prompt": "a", "n": 100_000}, openai.BadRequestError, "n"),
    ("/completions", {"prompt": "a", "max_tokens": -1}, openai.BadRequestError, "max_tokens"),
    ("/completions", {"prompt": "a", "logprobs": 100}, openai.BadRequestError, "logprobs"),
    ("/completions", {"prompt": "a", "stop": ""}, openai.BadRequestError, "stop"),
    ("/completions", {"prompt": "a", "stop": ["x"] * 99}, openai.BadRequestError, "stop"),
    (
        "/completions",
        {"prompt": "a", "logit_bias": {"999999": 5}},
        openai.BadRequestError,
        "logit_bias",
    ),
    (
        "/completions",
        {"prompt": "a", "logit_bias": {"abc": 5}},
        openai.BadRequestError,
        "logit_bias",
    ),
    (
        "/completions",
        {"prompt": "a", "logit_bias": {"5": 1e9}},
        openai.BadRequestError,
        "logit_bias",
    ),
    ("/completions", {"prompt": "a", "model": "x"}, openai.NotFoundError, "model"),
    ("/chat/completions", {"messages": []}, openai.BadRequestError, "messages"),
    ("/chat/completions", {"messages": [{}]}, openai.BadRequestError, "messages[0]"),
    (
        "/chat/completions",
        {"messages": MESSAGES, "top_logprobs": 2},
        openai.BadRequestError,
        "top_logprobs",
    ),
    (
        "/chat/completions",
        {"messages": MESSAGES, "stream_options": {"include_usage": True}},
        openai.BadRequestError,
        "stream_options",
    ),
    ("/nothing", {}, openai.NotFoundError, None),
]


def test_wrong_bodies_raise_the_clients_own_errors_and_the_next_call_works(
    served: Serving, http: httpx.Client
) -> None:
    with served.sdk() as client:
        for path, body, kind, param in WRONG:
            with pytest.raises(openai.APIStatusError) as caught:
                client.post(path, body=body, cast_to=httpx.Response)
            assert type(caught.value) is kind, f"{body}: {caught.value!r}"
            assert caught.value.param == param
            assert caught.value.type == "invalid_request_error"
            assert caught.value.body is not None
            assert set(caught.value.body) == {"message", "type", "param", "code"}  # type: ignore[call-overload]
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        assert client.completions.create(model=None, prompt="a", max_tokens=1).choices  # type: ignore[arg-type]
