"""The client's side of the front protocol, message by message."""

import numpy as np
import pytest

from cluster.frontend.draft import RequestOptions, draft_of
from cluster.frontend.errors import EngineLost, NoWorkers, ProtocolMismatch, QueueFull
from cluster.frontend.requests import LiveRequest
from cluster.frontend.session import BadMessage, FrontSession, Ticket
from cluster.frontend.tokenizer import Tokenizer
from cluster.messages.clients import ClientHello, EngineStarting, Refusal, TokenizerRequest
from cluster.messages.reports import Status, StatusRequest
from cluster.messages.sockets import FromClient
from cluster.wire import PROTOCOL_VERSION
from scheduler.arrays import int32
from scheduler.errors import InvalidRequest
from scheduler.plan import LogprobRows
from scheduler.request import Abort, Ended, Finish, Rejection, Request, Started, TokenBatch
from scheduler.sampling import SamplingParams
from tests.cluster.frontend.fake_engine import make_info, tokens
from tests.cluster.frontend.tiny_tokenizers import llama3_like

TOKENIZER = Tokenizer(llama3_like())
END = TOKENIZER.eos_token_id or 0
TEXT = " the quick brown fox"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False)


def ready_session() -> FrontSession:
    session = FrontSession(PROTOCOL_VERSION)
    assert session.receive(make_info(), 0.0) == []
    return session


def submit(
    session: FrontSession, prompt: str = "hi", **sampling: object
) -> tuple[LiveRequest, list[FromClient]]:
    draft = draft_of(
        prompt,
        SamplingParams(**({"max_tokens": 30} | sampling)),  # type: ignore[arg-type]
        RequestOptions(),
        info=make_info(),
        tokenizer=TOKENIZER,
        seed=1,
        request_id="r",
    )
    return session.submit(draft, 0.0)


def handle_of(live: LiveRequest) -> int:
    return live.outputs[0].handle


def aborted(messages: list[FromClient]) -> list[int]:
    return [handle for m in messages if isinstance(m, Abort) for handle in m.handle.tolist()]


def test_it_begins_with_a_hello_and_is_ready_with_the_engines_answer() -> None:
    session = FrontSession(PROTOCOL_VERSION, "me")

    assert session.hello() == [ClientHello(protocol=PROTOCOL_VERSION, label="me")]
    session.receive(EngineStarting(message="loading weights"), 0.0)
    assert session.info is None
    assert session.news == "loading weights"
    session.receive(make_info(), 0.0)
    assert session.info == make_info()
    assert session.news == ""


def test_an_engine_of_another_protocol_is_refused_with_both_numbers() -> None:
    with pytest.raises(ProtocolMismatch, match=rf"99.*{PROTOCOL_VERSION}"):
        FrontSession(PROTOCOL_VERSION).receive(make_info(protocol=99), 0.0)
    with pytest.raises(ProtocolMismatch, match="speak 7"):
        FrontSession(PROTOCOL_VERSION).receive(Refusal(reason="protocol", message="speak 7"), 0.0)


def test_tokens_grow_the_right_request_whatever_the_order_of_rows() -> None:
    session = ready_session()
    one, two = submit(session)[0], submit(session)[0]

    session.receive(
        TokenBatch(handle=int32([handle_of(two), handle_of(one)]), token=int32(IDS[:2])), 1.0
    )
    session.receive(
        TokenBatch(
            handle=int32([handle_of(one), handle_of(two)]),
            count=int32([0, 2]),
            token=int32(IDS[2:4]),
        ),
        2.0,
    )

    assert one.outputs[0].token_ids == IDS[1:2]
    assert two.outputs[0].token_ids == [IDS[0], IDS[2], IDS[3]]
    assert list(two.outputs[0].arrivals_s) == [1.0, 2.0, 2.0]


def test_an_end_token_ends_the_output_and_adds_no_text() -> None:
    session = ready_session()
    live, _ = submit(session)

    sent = session.receive(tokens(handle_of(live), [*IDS, END], Finish.STOP), 1.0)

    output = live.outputs[0]
    assert live.is_done
    assert session.num_live == 0
    assert sent == []
    assert (output.text, output.token_ids) == (TEXT, [*IDS, END])
    assert (output.finish, output.stop_reason) == (Finish.STOP, None)


def test_a_stop_token_of_the_caller_is_the_stop_reason() -> None:
    session = ready_session()
    live, _ = submit(session, stop_token_ids=[END])

    session.receive(tokens(handle_of(live), [*IDS, END], Finish.STOP), 1.0)

    assert live.outputs[0].stop_reason == END


def test_an_ordinary_stop_token_is_trimmed_from_the_text_unless_asked_for() -> None:
    for is_included in (False, True):
        session = ready_session()
        live, _ = submit(session, stop_token_ids=[IDS[-1]], include_stop_str_in_output=is_included)

        session.receive(tokens(handle_of(live), IDS, Finish.STOP), 1.0)

        wanted = TOKENIZER.decode(IDS if is_included else IDS[:-1])
        assert (live.outputs[0].text, live.outputs[0].token_ids) == (wanted, IDS)


def test_a_special_end_token_shows_once_if_special_tokens_are_asked_for() -> None:
    session = ready_session()
    live, _ = submit(session, skip_special_tokens=False)

    session.receive(tokens(handle_of(live), [*IDS, END], Finish.STOP), 1.0)

    assert live.outputs[0].text == TEXT + "<|im_end|>"


def test_a_stop_string_trims_ends_and_aborts() -> None:
    session = ready_session()
    live, _ = submit(session, stop=["ck bro"])

    sent = session.receive(tokens(handle_of(live), IDS), 1.0)

    output = live.outputs[0]
    assert aborted(sent) == [handle_of(live)]
    assert session.num_live == 0
    assert (output.text, output.finish, output.stop_reason) == (" the qui", Finish.STOP, "ck bro")
    assert output.token_ids == IDS[: len(output.token_ids)]
    assert TOKENIZER.decode(output.token_ids).startswith(" the quick bro")


def test_a_stop_string_in_the_last_tokens_wins_and_needs_no_abort() -> None:
    session = ready_session()
    live, _ = submit(session, stop=["brown"])

    sent = session.receive(tokens(handle_of(live), IDS, Finish.LENGTH), 1.0)

    assert sent == []
    assert live.outputs[0].finish is Finish.STOP
    assert live.outputs[0].stop_reason == "brown"


def test_late_news_of_a_stopped_request_is_dropped_and_counted() -> None:
    session = ready_session()
    live, _ = submit(session, stop=["quick"])
    session.receive(tokens(handle_of(live), IDS), 1.0)
    before = live.outputs[0].text

    session.receive(tokens(handle_of(live), IDS), 2.0)
    session.receive(Rejection(handle=handle_of(live), reason="invalid", message="late"), 2.0)

    assert session.num_unknown == 2
    assert live.failure is None
    assert live.outputs[0].text == before


def test_text_held_back_comes_out_at_the_end() -> None:
    session = ready_session()
    live, _ = submit(session, stop=["fox and hound"])

    session.receive(tokens(handle_of(live), IDS), 1.0)
    held = live.outputs[0].text
    session.receive(tokens(handle_of(live), [], Finish.LENGTH), 2.0)

    assert len(held) < len(TEXT)
    assert live.outputs[0].text == TEXT


def test_figures_come_with_the_first_and_the_last_tokens() -> None:
    session = ready_session()
    live, _ = submit(session)
    handle = handle_of(live)

    session.receive(
        tokens(handle, IDS[:1], started=(Started(handle=handle, num_cached_tokens=16, queue_s=2),)),
        1.0,
    )
    session.receive(
        tokens(
            handle,
            [],
            Finish.TIMEOUT,
            ended=(Ended(handle=handle, num_preemptions=3, message="1 s passed"),),
        ),
        2.0,
    )

    output = live.outputs[0]
    assert (output.num_cached_tokens, output.queue_s, output.num_preemptions) == (16, 2.0, 3)
    assert (output.finish, output.message) == (Finish.TIMEOUT, "1 s passed")


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("invalid", InvalidRequest),
        ("too_long", InvalidRequest),
        ("queue_full", QueueFull),
        ("no_workers", NoWorkers),
    ],
)
def test_a_rejection_is_a_named_error(reason: str, kind: type[Exception]) -> None:
    session = ready_session()
    live, _ = submit(session)

    session.receive(
        Rejection(handle=handle_of(live), reason=reason, message="why", retry_after_s=2.5), 1.0
    )

    assert isinstance(live.failure, kind)
    assert str(live.failure) == "why"
    assert live.is_done
    assert session.num_live == 0
    if isinstance(live.failure, QueueFull):
        assert live.failure.retry_after_s == 2.5


def test_one_rejected_output_of_several_ends_the_request() -> None:
    session = ready_session()
    live, sent = submit(session, n=3, temperature=0.9)
    handles = [message.handle for message in sent if isinstance(message, Request)]

    replies = session.receive(Rejection(handle=handles[1], reason="queue_full", message="x"), 1.0)

    assert aborted(replies) == [handles[0], handles[2]]
    assert isinstance(live.failure, QueueFull)
    assert session.num_live == 0


def test_cancelling_keeps_what_is_there_and_aborts_the_rest() -> None:
    session = ready_session()
    live, _ = submit(session, n=2, temperature=0.9)
    first, second = (output.handle for output in live.outputs)
    session.receive(tokens(first, [*IDS, END], Finish.STOP), 1.0)
    session.receive(tokens(second, IDS[:2]), 1.0)

    sent = session.cancel(live)

    assert aborted(sent) == [second]
    assert live.is_done
    assert [output.finish for output in live.outputs] == [Finish.STOP, Finish.ABORT]
    assert live.outputs[1].text == TOKENIZER.decode(IDS[:2])
    assert session.cancel(live) == []


def test_losing_the_engine_fails_what_is_live_and_only_that() -> None:
    session = ready_session()
    done, _ = submit(session)
    session.receive(tokens(handle_of(done), [END], Finish.STOP), 1.0)
    live, _ = submit(session)
    ticket = Ticket(Status)
    session.ask(StatusRequest(), ticket)
    told: list[LiveRequest] = []
    live.watchers.append(told.append)

    session.lose(EngineLost("gone"))

    assert isinstance(live.failure, EngineLost)
    assert told == [live]
    assert done.failure is None
    assert isinstance(ticket.failure, EngineLost)
    assert session.info is None
    assert session.num_live == 0


def test_handles_differ_from_those_of_live_requests() -> None:
    session = ready_session()
    handles = [handle_of(submit(session)[0]) for _ in range(50)]

    assert len(set(handles)) == 50


def test_statuses_answer_those_who_asked_in_their_order() -> None:
    session = ready_session()
    given_up, waiting = Ticket(Status), Ticket(Status)
    assert session.ask(StatusRequest(), given_up) == [StatusRequest()]
    session.ask(StatusRequest(), waiting)
    session.forget(given_up)
    status = Status(engine_id="e", model="m", state="serving", uptime_s=2.0)

    session.receive(Status(engine_id="e", model="m", state="serving", uptime_s=1.0), 0.0)
    assert waiting.answer is None
    session.receive(status, 0.0)
    session.receive(status, 0.0)  # nobody asked

    assert waiting.answer == status


def test_the_tokenizer_is_asked_for_once_and_again_only_if_it_is_another() -> None:
    session = ready_session()

    assert session.ask_tokenizer() == [TokenizerRequest()]
    assert session.ask_tokenizer() == []
    session.receive(llama3_like(), 0.0)
    session.lose(EngineLost("gone"))
    session.receive(make_info(engine_id="next"), 0.0)
    assert session.ask_tokenizer() == []
    session.lose(EngineLost("gone"))
    session.receive(make_info(engine_id="other", tokenizer_digest="other"), 0.0)
    assert session.ask_tokenizer() == [TokenizerRequest()]


def logprob_rows(handles_row: int, position: int, ids: list[int]) -> LogprobRows:
    return LogprobRows(
        row=int32([handles_row]),
        position=int32([position]),
        width=len(ids),
        token=int32(ids),
        logprob=np.asarray([-float(i) for i in range(len(ids))], dtype=np.float32),
        rank=int32([7]),
    )


def test_logprobs_go_to_their_positions_without_the_padding() -> None:
    session = ready_session()
    live, _ = submit(session, logprobs=2, prompt_logprobs=2)
    num_prompt, handle = live.draft.num_prompt, handle_of(live)

    session.receive(tokens(handle, logprobs=logprob_rows(0, num_prompt - 1, [9, 8, 7])), 1.0)
    session.receive(
        tokens(handle, IDS[:1], logprobs=logprob_rows(0, num_prompt, [IDS[0], 4, -1])), 2.0
    )

    entry = live.outputs[0].logprobs[0]
    assert entry is not None
    assert entry.token_ids == (IDS[0], 4)
    assert (entry.logprobs, entry.ranks) == ((0.0, -1.0), (7, 1))
    assert live.prompt_logprobs[num_prompt - 1].token_ids == (9, 8, 7)


@pytest.mark.parametrize(
    "batch",
    [
        TokenBatch(handle=int32([1, 2]), token=int32([5])),
        TokenBatch(handle=int32([1]), count=int32([3]), token=int32([5])),
        TokenBatch(handle=int32([1, 2]), count=int32([2, -1]), token=int32([5])),
        TokenBatch(handle=int32([1, 2]), count=int32([1]), token=int32([5])),
        TokenBatch(handle=int32([1]), token=int32([5]), finish=np.asarray([77], dtype=np.uint8)),
        TokenBatch(handle=int32([1]), token=int32([5]), logprobs=logprob_rows(3, 0, [1])),
        TokenBatch(
            handle=int32([1]),
            token=int32([5]),
            logprobs=LogprobRows(
                row=int32([0]),
                position=int32([0]),
                width=2,
                token=int32([1]),
                logprob=np.zeros(1, np.float32),
                rank=int32([1]),
            ),
        ),
    ],
    ids=["tokens", "count", "negative", "counts", "finish", "row", "width"],
)
def test_columns_that_do_not_fit_together_are_a_bad_message(batch: TokenBatch) -> None:
    with pytest.raises(BadMessage):
        ready_session().receive(batch, 1.0)
