"""The client that users hold, against an engine without a model."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster.frontend.tokenizer import Tokenizer
from cluster.messages.sockets import ToClient
from scheduler.arrays import int32
from scheduler.plan import LogprobRows
from scheduler.request import Abort, Ended, Finish, Rejection, Request
from stoker import (
    Client,
    ClientClosed,
    EngineLost,
    InvalidRequest,
    Logprob,
    QueueFull,
    RequestOutput,
    SamplingParams,
    WaitTimedOut,
)
from tests.cluster.frontend.fake_engine import (
    ANSWER,
    FakeEngine,
    answer_at_once,
    ipc_address,
    say_nothing,
    tokens,
)
from tests.cluster.frontend.tiny_tokenizers import llama3_like

TOKENIZER = Tokenizer(llama3_like())
IDS = TOKENIZER.encode(ANSWER, add_special_tokens=False)
LONG = SamplingParams(max_tokens=40)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with FakeEngine(ipc_address(tmp_path), script=answer_at_once) as fake:
        yield fake


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[Client]:
    with Client(engine.address, recovery_s=0.0) as connected:
        yield connected


def test_generate_answers_all_prompts_in_their_order(client: Client) -> None:
    prompts = ["one", {"prompt": "two"}, {"prompt_token_ids": [1, 2, 3]}, [4, 5]]

    outputs = client.generate(prompts, [SamplingParams(max_tokens=n) for n in (1, 2, 3, 4)])

    assert [output.prompt for output in outputs] == ["one", "two", None, None]
    assert [output.prompt_token_ids for output in outputs[2:]] == [[1, 2, 3], [4, 5]]
    assert [output.outputs[0].token_ids for output in outputs] == [IDS[:n] for n in (1, 2, 3, 4)]
    assert all(output.finished for output in outputs)
    assert {output.num_cached_tokens for output in outputs} == {2}


def test_generate_of_nothing_is_nothing(client: Client) -> None:
    assert client.generate([]) == []


def test_an_answer_carries_its_figures(client: Client) -> None:
    (output,) = client.generate("hi", LONG)

    metrics = output.metrics
    assert len(metrics.itl_s) == len(IDS) - 1
    assert metrics.num_preemptions == 1
    assert metrics.ttft_s is not None
    assert metrics.total_s is not None
    assert 0 < metrics.ttft_s <= metrics.total_s
    assert metrics.total_s == pytest.approx(metrics.ttft_s + sum(metrics.itl_s))


def test_n_outputs_are_n_requests_with_consecutive_seeds(
    engine: FakeEngine, client: Client
) -> None:
    (output,) = client.generate("hi", SamplingParams(n=3, seed=5, max_tokens=2))

    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [completion.token_ids for completion in output.outputs] == [IDS[:2]] * 3
    assert [engine.next_request().sampling.seed for _ in range(3)] == [5, 6, 7]


def test_seeds_are_drawn_where_none_is_given(engine: FakeEngine, client: Client) -> None:
    client.generate(["hi"] * 8, LONG)

    assert len({engine.next_request().sampling.seed for _ in range(8)}) == 8


def test_the_same_client_seed_draws_the_same_seeds(engine: FakeEngine) -> None:
    drawn = []
    for _ in range(2):
        with Client(engine.address, seed=5) as client:
            client.generate(["hi"] * 3, LONG)
        drawn.append([engine.next_request().sampling.seed for _ in range(3)])

    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3


def test_a_wrong_prompt_among_many_is_refused_before_any_is_sent(
    engine: FakeEngine, client: Client
) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        client.generate(["fine", []], LONG)

    assert engine.received.empty()


@pytest.mark.parametrize("count", [1, 3])
def test_a_list_of_parameters_of_another_length_is_refused(client: Client, count: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{count} entries for 2 prompts"):
        client.generate(["a", "b"], [LONG] * count)
    with pytest.raises(InvalidRequest, match=f"{count} entries for 2 prompts"):
        client.generate(["a", "b"], LONG, priority=[1] * count)


def test_chat_goes_through_the_template(engine: FakeEngine, client: Client) -> None:
    messages = [{"role": "user", "content": "hi"}]

    (output,) = client.chat(messages, LONG)

    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == TOKENIZER.encode_chat(messages)
    assert engine.next_request().prompt.tolist() == output.prompt_token_ids
    assert len(client.chat([messages, messages], LONG)) == 2


def test_chat_without_parameters_may_fill_the_context(engine: FakeEngine, client: Client) -> None:
    client.chat([{"role": "user", "content": "hi"}])

    request = engine.next_request()
    assert request.sampling.max_tokens == engine.info.max_model_len - len(request.prompt)


@pytest.mark.parametrize("messages", [[], [[]], [{"role": "user"}], [{"content": "x"}]])
def test_a_conversation_that_is_none_is_refused(client: Client, messages: list[object]) -> None:
    with pytest.raises(InvalidRequest):
        client.chat(messages)  # type: ignore[arg-type]


def test_an_unknown_template_option_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="no option 'tool'"):
        client.chat([{"role": "user", "content": "hi"}], template={"tool": []})


def test_pieces_join_to_the_answer_and_the_last_one_says_why(client: Client) -> None:
    handle = client.submit("hi", LONG)

    pieces = list(handle)

    assert "".join(piece.text for piece in pieces) == ANSWER == handle.result().outputs[0].text
    assert [token for piece in pieces for token in piece.token_ids] == IDS
    assert [piece.finish_reason for piece in pieces][-1] == "length"
    assert not any(piece.finish_reason for piece in pieces[:-1])
    assert "".join(piece.text for piece in handle) == ANSWER, "iterating again starts again"


def test_pieces_come_while_the_request_runs(engine: FakeEngine, client: Client) -> None:
    engine.script = say_nothing
    handle = client.submit("hi", LONG, request_id="mine")
    request = engine.next_request()
    pieces = iter(handle)

    engine.send(tokens(request.handle, IDS[:1]))
    first = next(pieces)
    engine.send(tokens(request.handle, IDS[1:3]))
    second = next(pieces)

    assert (first.token_ids, second.token_ids) == (IDS[:1], IDS[1:3])
    assert not handle.is_done
    assert handle.snapshot().outputs[0].token_ids == IDS[:3]
    assert handle.request_id == request.label == "mine"


def test_many_requests_are_in_flight_from_many_threads(client: Client) -> None:
    texts: list[str] = []

    def work() -> None:
        handles = [client.submit("hi", LONG) for _ in range(10)]
        texts.extend(handle.result(10.0).outputs[0].text for handle in reversed(handles))

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert texts == [ANSWER] * 50


def test_cancelling_keeps_what_came_and_tells_the_engine(
    engine: FakeEngine, client: Client
) -> None:
    engine.script = say_nothing
    handle = client.submit("hi", LONG)
    request = engine.next_request()
    engine.send(tokens(request.handle, IDS[:2]))
    next(iter(handle))

    handle.cancel()

    completion = handle.result(10.0).outputs[0]
    assert (completion.token_ids, completion.finish_reason) == (IDS[:2], "abort")
    message = engine.received.get(timeout=10)
    assert isinstance(message, Abort)


def test_leaving_a_with_block_cancels(engine: FakeEngine, client: Client) -> None:
    engine.script = say_nothing

    with client.submit("hi", LONG) as handle:
        engine.next_request()

    assert handle.result().outputs[0].finish_reason == "abort"


def test_a_wait_may_be_bounded(engine: FakeEngine, client: Client) -> None:
    engine.script = say_nothing
    handle = client.submit("hi", LONG)

    with pytest.raises(WaitTimedOut):
        handle.result(timeout_s=0.01)
    assert not handle.is_done


def test_a_timeout_ends_the_request_with_its_tokens_and_says_why(
    engine: FakeEngine, client: Client
) -> None:
    def time_out(request: Request) -> list[ToClient]:
        ended = (Ended(handle=request.handle, message="1 s passed"),)
        return [tokens(request.handle, IDS[:2], Finish.TIMEOUT, ended=ended)]

    engine.script = time_out

    completion = client.generate("hi", LONG, timeout_s=1.0)[0].outputs[0]

    assert (completion.finish_reason, completion.message) == ("timeout", "1 s passed")
    assert completion.token_ids == IDS[:2]
    assert engine.next_request().timeout_s == 1.0


def test_pieces_before_a_loss_come_before_the_error(engine: FakeEngine, client: Client) -> None:
    engine.script = lambda request: [tokens(request.handle, IDS[:2])]
    handle = client.submit("hi", LONG)
    pieces = iter(handle)

    assert next(pieces).token_ids == IDS[:2]
    engine.close()
    assert next(pieces).finish_reason == "error"
    with pytest.raises(EngineLost):
        next(pieces)
    with pytest.raises(EngineLost):
        handle.result()


def test_closing_ends_what_waits(engine: FakeEngine, client: Client) -> None:
    engine.script = say_nothing
    handle = client.submit("hi", LONG)
    engine.next_request()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            handle.result(10.0)
        except ClientClosed as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    client.close()
    thread.join(10)

    assert len(errors) == 1


def test_a_dropped_client_ends_its_thread(engine: FakeEngine) -> None:
    client = Client(engine.address)
    client.info()
    name = f"stoker-client {engine.address}"
    (thread,) = [thread for thread in threading.enumerate() if thread.name == name]

    del client

    thread.join(10)
    assert not thread.is_alive()


def test_a_batch_larger_than_the_queue_is_answered_whole(
    engine: FakeEngine, client: Client
) -> None:
    num_seen = 0

    def refuse_every_third(request: Request) -> list[ToClient]:
        nonlocal num_seen
        num_seen += 1
        if num_seen % 3:
            return answer_at_once(request)
        return [Rejection(handle=request.handle, reason="queue_full", message="full")]

    engine.script = refuse_every_third
    prompts = [f"prompt {i}" for i in range(40)]
    told: list[RequestOutput] = []

    outputs = client.generate(prompts, LONG, on_answer=told.append)

    assert [output.prompt for output in outputs] == prompts
    assert sorted(output.request_id for output in told) == sorted(o.request_id for o in outputs)


def test_one_refused_request_ends_a_batch_and_aborts_the_rest(
    engine: FakeEngine, client: Client
) -> None:
    def refuse_long(request: Request) -> list[ToClient]:
        if len(request.prompt) < 5:
            return []
        return [Rejection(handle=request.handle, reason="too_long", message="300 over 192")]

    engine.script = refuse_long

    with pytest.raises(InvalidRequest, match="300 over 192"):
        client.generate([[1, 2], [1] * 6, [3]], LONG)

    handles = [engine.next_request().handle for _ in range(3)]
    aborted: list[int] = []
    while len(aborted) < 2:
        message = engine.received.get(timeout=10)
        assert isinstance(message, Abort)
        aborted += message.handle.tolist()
    assert sorted(aborted) == [handles[0], handles[2]]


def test_a_full_queue_is_an_error_with_advice_for_a_single_request(
    engine: FakeEngine, client: Client
) -> None:
    engine.script = lambda request: [
        Rejection(handle=request.handle, reason="queue_full", message="8 wait", retry_after_s=2.0)
    ]

    with pytest.raises(QueueFull, match="8 wait") as caught:
        client.submit("hi", LONG).result(10.0)

    assert caught.value.retry_after_s == 2.0


def with_logprobs(request: Request) -> list[ToClient]:
    """Two tokens with two alternatives each, and the prompt's, in one batch."""
    num_prompt = len(request.prompt)
    positions = [*range(1, num_prompt), num_prompt, num_prompt + 1]
    ids = [[*request.prompt.tolist()[1:], *IDS[:2]][i] for i in range(len(positions))]
    rows = len(positions)
    columns = LogprobRows(
        row=int32([0] * rows),
        position=int32(positions),
        width=3,
        token=int32([value for token in ids for value in (token, 11, -1)]),
        logprob=np.asarray([-1.5, -0.5, 0.0] * rows, dtype=np.float32),
        rank=int32([2] * rows),
    )
    return [tokens(request.handle, IDS[:2], Finish.LENGTH, logprobs=columns)]


def test_logprobs_have_vllms_shape(engine: FakeEngine, client: Client) -> None:
    engine.script = with_logprobs

    (output,) = client.generate("hi", SamplingParams(logprobs=1, prompt_logprobs=1))

    completion = output.outputs[0]
    assert completion.logprobs == [
        {
            token: Logprob(-1.5, 2, TOKENIZER.token_text(token)),
            11: Logprob(-0.5, 1, TOKENIZER.token_text(11)),
        }
        for token in IDS[:2]
    ]
    assert completion.cumulative_logprob == -3.0
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entry or ())) for entry in output.prompt_logprobs[1:]] == (
        output.prompt_token_ids[1:]
    )


def test_without_asking_there_are_no_logprobs(client: Client) -> None:
    (output,) = client.generate("hi", LONG)

    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_pieces_carry_their_logprobs(engine: FakeEngine, client: Client) -> None:
    engine.script = with_logprobs

    pieces = list(client.submit("hi", SamplingParams(logprobs=1)))

    found = [entry for piece in pieces for entry in piece.logprobs or ()]
    assert [next(iter(entry)) for entry in found] == IDS[:2]


def test_special_tokens_and_broken_characters_have_a_text_in_logprobs(
    engine: FakeEngine, client: Client
) -> None:
    lead_byte = next(i for i in range(256) if TOKENIZER.token_bytes(i) == b"\xf0")
    end = TOKENIZER.eos_token_id or 0

    def answer(request: Request) -> list[ToClient]:
        columns = LogprobRows(
            row=int32([0]),
            position=int32([len(request.prompt)]),
            width=2,
            token=int32([lead_byte, end]),
            logprob=np.zeros(2, np.float32),
            rank=int32([2]),
        )
        return [tokens(request.handle, [lead_byte], Finish.LENGTH, logprobs=columns)]

    engine.script = answer

    (output,) = client.generate("hi", SamplingParams(logprobs=1, max_tokens=1))

    assert output.outputs[0].text == "\ufffd"
    (entry,) = output.outputs[0].logprobs or [{}]
    assert entry[lead_byte].decoded_token == "\ufffd"
    assert entry[end].decoded_token == "<|im_end|>"


def test_the_status_and_the_defaults_are_the_engines(engine: FakeEngine, client: Client) -> None:
    assert client.status() == engine.status
    assert client.info() == engine.info
    assert client.get_default_sampling_params() == SamplingParams()
