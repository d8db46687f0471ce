"""What users do with a real model, through a real cluster of processes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest

from cluster.frontend.tokenizer import Tokenizer
from cluster.messages.reports import Status
from stoker import LLM, Client, InvalidRequest, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(
        smollm2,
        backend="local",
        num_kv_blocks=64,
        max_model_len=512,
        max_num_seqs=8,
        front_address="tcp://127.0.0.1:0",
        log_level="warning",
    ) as started:
        yield started


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_directory(smollm2)


def wait_until(client: Client, condition: Callable[[Status], bool]) -> Status:
    """Ask until the engine's status is as it should be; it has ten seconds."""
    deadline = monotonic() + 10.0
    while not condition(status := client.status()):
        assert monotonic() < deadline, status
    return status


def is_idle(status: Status) -> bool:
    return status.num_running == 0 and sum(group.num_used_blocks for group in status.groups) == 0


def test_a_chat_is_answered_as_the_model_answers_it(llm: LLM, tokenizer: Tokenizer) -> None:
    (output,) = llm.chat(QUESTION, GREEDY)

    completion = output.outputs[0]
    assert completion.text == "The capital of France is Paris."
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert output.prompt_token_ids == tokenizer.encode_chat(QUESTION)
    assert len(output.prompt_token_ids) == 37
    assert tokenizer.decode(completion.token_ids) == completion.text


def test_a_remote_client_needs_the_address_and_the_key_file_only(llm: LLM) -> None:
    with Client(llm.address, key_file=llm.key_file) as client:
        pieces = list(client.submit_chat(QUESTION, GREEDY))

    assert llm.address.startswith("tcp://127.0.0.1:")
    assert "".join(piece.text for piece in pieces) == "The capital of France is Paris."
    assert len(pieces) > 1


def test_an_end_token_shows_only_if_special_tokens_do(llm: LLM) -> None:
    shown = SamplingParams(temperature=0.0, max_tokens=24, skip_special_tokens=False)

    (output,) = llm.chat(QUESTION, shown)

    assert output.outputs[0].text == "The capital of France is Paris.<|im_end|>"


def test_a_stop_string_ends_the_text_and_the_work(llm: LLM) -> None:
    before = llm.client.status().totals
    text, stop = "The capital of France is Paris.", "apital"
    sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stop=[stop])

    (output,) = llm.chat(QUESTION, sampling)

    completion = output.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    after = wait_until(llm.client, is_idle).totals
    assert after.finished["abort"] == before.finished.get("abort", 0) + 1
    assert after.output_tokens - before.output_tokens < 20


def test_outputs_of_one_prompt_differ_and_repeat_with_the_seed(llm: LLM) -> None:
    sampling = SamplingParams(n=3, seed=11, temperature=0.9, max_tokens=8, ignore_eos=True)

    first, second = (llm.generate("Once upon a time", sampling)[0] for _ in range(2))

    texts = [completion.text for completion in first.outputs]
    assert len(set(texts)) == 3
    assert texts == [completion.text for completion in second.outputs]
    alone = SamplingParams(seed=12, temperature=0.9, max_tokens=8, ignore_eos=True)
    assert llm.generate("Once upon a time", alone)[0].outputs[0].text == texts[1]


def test_a_repeated_prompt_comes_from_the_cache_unless_the_salt_differs(llm: LLM) -> None:
    prompt, one_token = "word " * 50, SamplingParams(max_tokens=1)

    def num_cached(**options: str) -> int:
        return llm.generate(prompt, one_token, **options)[0].num_cached_tokens  # type: ignore[arg-type]

    assert num_cached() == 0
    num_prompt = len(llm.generate(prompt, one_token)[0].prompt_token_ids)
    assert num_cached() == (num_prompt - 1) // 16 * 16
    assert num_cached(cache_salt="other") == 0
    assert num_cached(cache_salt="other") > 0


def test_logprobs_of_output_and_prompt_are_whole(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2)

    (output,) = llm.generate("The capital of France is", sampling)

    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token].rank == 1
        assert [choice.rank for choice in entry.values()] == [1, 2, 3]
        assert entry[token].logprob == max(choice.logprob for choice in entry.values())
    assert completion.cumulative_logprob == pytest.approx(
        sum(
            entry[t].logprob
            for t, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        )
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert token in entry
        assert 2 <= len(entry) <= 3


def test_a_client_that_vanishes_leaves_nothing_running(llm: LLM) -> None:
    client = Client(llm.address, key_file=llm.key_file)
    endless = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0)
    handle = client.submit("Once", endless)
    next(iter(handle))

    client.close()

    wait_until(llm.client, is_idle)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([], "empty"),
        ([49152], "0 to 49151"),
        ([1] * 512, r"512 tokens.* 512"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_next_call_works(
    llm: LLM, prompt: str | list[int], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        llm.client.submit(prompt).result(10.0)

    assert llm.generate("hi", SamplingParams(max_tokens=1))[0].finished


def test_the_longest_prompt_yields_one_token(llm: LLM) -> None:
    (output,) = llm.generate({"prompt_token_ids": [500] * 511}, GREEDY)

    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_a_deadline_ends_a_request_with_what_it_has(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0)

    (output,) = llm.generate("Once", endless, timeout_s=0.5)

    assert output.outputs[0].finish_reason in ("timeout", "length")
    wait_until(llm.client, is_idle)


def test_more_prompts_than_slots_are_all_answered(llm: LLM) -> None:
    prompts = [f"{number} plus one is" for number in range(20)]

    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=3))

    assert [output.prompt for output in outputs] == prompts
    assert all(len(output.outputs[0].token_ids) <= 3 for output in outputs)
