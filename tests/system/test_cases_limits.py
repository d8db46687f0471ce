"""Queues and limits, from what people reported: cases 73, 81 to 83, in a cluster with little."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker import LLM, Client, InvalidRequest, QueueFull
from tests.system.served import greedy, settled, tokens_of
from tests.worker.tiny_models import save_model

BLOCKS, SIZE, CONTEXT, SEQS, QUEUE = 12, 8, 200, 4, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("tiny"))[1]


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[LLM]:
    with small_cluster(model) as llm:
        yield llm


def small_cluster(model: Path) -> LLM:
    """A tiny random model with 96 tokens of K/V, four slots and eight places in the queue."""
    return LLM(
        model,
        backend="local",
        max_model_len=CONTEXT,
        block_size=SIZE,
        num_kv_blocks=BLOCKS,
        max_num_seqs=SEQS,
        max_num_batched_tokens=16,
        max_waiting_requests=QUEUE,
        scheduling_policy="priority",
        priority_ageing_s=1000.0,
        log_level="warning",
    )


@pytest.fixture
def client(small: LLM) -> Iterator[Client]:
    with Client(small.address) as client:
        yield client
        settled(client)


def prompt(length: int, first: int = 3) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(first + 5 * at) % 97 for at in range(length)]}


def test_case_73_a_prompt_that_fits_the_context_but_not_the_pool_is_refused_at_once(
    client: Client,
) -> None:
    shorts = [client.submit(prompt(5, at), greedy(4, ignore_eos=True)) for at in range(3)]
    began = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        client.submit(prompt(150), greedy(4)).result()

    assert time.monotonic() - began < 5.0
    for number in ("150", str(150 // SIZE + 1), str(BLOCKS), "num_kv_blocks"):
        assert number in str(caught.value)
    assert [len(tokens_of(short.result())) for short in shorts] == [4, 4, 4]


def test_an_output_that_outgrows_the_pool_ends_by_length(client: Client) -> None:
    (output,) = client.generate(prompt(90), greedy(50, ignore_eos=True))

    assert len(tokens_of(output)) == BLOCKS * SIZE - 90
    assert output.outputs[0].finish_reason == "length"


@pytest.fixture
def flooded(model: Path) -> Iterator[Client]:
    """Of a cluster of its own, since places are kept for those that it refuses."""
    with small_cluster(model) as llm, Client(llm.address) as client:
        yield client


def test_case_81_a_full_queue_refuses_at_once_and_takes_new_ones_after(flooded: Client) -> None:
    """Limit 8 with 4 slots: about 12 are taken, and each that was taken is answered whole."""
    client = flooded
    asked = greedy(60, ignore_eos=True)
    handles = [client.submit(prompt(6, at), asked) for at in range(60)]
    answered = refused = 0
    for handle in handles:
        try:
            assert len(tokens_of(handle.result(60.0))) == 60
            answered += 1
        except QueueFull as error:
            assert f"max_waiting_requests={QUEUE}" in str(error)  # noqa: PT017  # not each is
            refused += 1
    assert answered + refused == 60
    assert answered >= QUEUE
    assert refused > 0
    settled(client)
    (after,) = client.generate(prompt(6), greedy(3, ignore_eos=True))
    assert len(tokens_of(after)) == 3


def test_case_82_a_request_that_nobody_waits_for_any_more_is_not_begun(client: Client) -> None:
    blockers = [client.submit(prompt(4, at), greedy(90, ignore_eos=True)) for at in range(SEQS)]
    hopeless = client.submit(prompt(80), greedy(5, ignore_eos=True), timeout_s=1e-4)
    output = hopeless.result(60.0)

    assert output.outputs[0].finish_reason == "timeout"
    assert "timeout_s" in output.outputs[0].message
    assert tokens_of(output) == []
    for blocker in blockers:
        blocker.cancel()


def test_case_83_a_request_of_high_priority_starts_before_those_that_wait(client: Client) -> None:
    low = [
        client.submit(prompt(20, at), greedy(20, ignore_eos=True), priority=5) for at in range(7)
    ]
    high = client.submit(prompt(20, 50), greedy(1, ignore_eos=True), priority=0)
    high.result(60.0)
    still = sum(not handle.is_done for handle in low)
    assert still >= 2, "nobody waited behind it"
    assert [len(tokens_of(handle.result(60.0))) for handle in low] == [20] * 7
