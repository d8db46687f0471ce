"""Requests of a lost connection go on with the next one, where they are."""

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from cluster.frontend.draft import RequestOptions, draft_of
from cluster.frontend.errors import EngineLost, NoWorkers
from cluster.frontend.requests import LiveRequest
from cluster.frontend.session import FrontSession
from cluster.frontend.tokenizer import Tokenizer
from cluster.messages.clients import AskTurn, EngineStopping, YourTurn
from cluster.messages.sockets import FromClient
from cluster.wire import FROM_CLIENT, PROTOCOL_VERSION
from scheduler.arrays import int32
from scheduler.request import (
    Abort,
    Finish,
    Rejection,
    Request,
    Started,
    Suspected,
    TokenBatch,
)
from scheduler.sampling import SamplingParams
from tests.cluster.frontend.fake_engine import make_info, tokens
from tests.cluster.frontend.test_session import logprob_rows
from tests.cluster.frontend.tiny_tokenizers import llama3_like

TOKENIZER = Tokenizer(llama3_like())
END = TOKENIZER.eos_token_id or 0
IDS = TOKENIZER.encode(" the quick brown fox jumps over the lazy dog", add_special_tokens=False)
GONE = EngineLost("lost the engine at ipc:///front: the connection ended")


@dataclass
class Scene:
    """A session and what it sends, at times that the test sets."""

    session: FrontSession = field(
        default_factory=lambda: FrontSession(PROTOCOL_VERSION, recovery_s=60.0)
    )
    now: float = 100.0
    sent: list[FromClient] = field(default_factory=list)

    def receive(self, message: object) -> None:
        self.sent += self.session.receive(message, self.now)  # type: ignore[arg-type]

    def connect(self, **info: object) -> None:
        self.receive(make_info(**info))  # type: ignore[arg-type]

    def lose(self) -> None:
        self.session.wait_for_next(GONE, self.now)

    def submit(self, timeout_s: float | None = None, **sampling: object) -> LiveRequest:
        draft = draft_of(
            "hi",
            SamplingParams(**({"max_tokens": 30} | sampling)),  # type: ignore[arg-type]
            RequestOptions(timeout_s=timeout_s, priority=3, cache_salt="salt", request_id="mine"),
            info=make_info(),
            tokenizer=TOKENIZER,
            seed=1,
            request_id="r",
        )
        live, sent = self.session.submit(draft, self.now)
        self.sent += sent
        return live

    def requests(self) -> list[Request]:
        """Those sent since the last look."""
        found = [message for message in self.sent if isinstance(message, Request)]
        self.sent.clear()
        return found

    def aborted(self) -> list[int]:
        found = [m.handle.tolist() for m in self.sent if isinstance(m, Abort)]
        self.sent.clear()
        return [handle for handles in found for handle in handles]

    def keep_time(self) -> None:
        self.sent += self.session.keep_time(self.now)


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.connect()
    return scene


def what_is_asked(request: Request) -> bytes:
    """Whatever its handle and age."""
    return FROM_CLIENT.encode(
        msgspec.structs.replace(request, handle=0, output=int32([]), age_s=0.0)
    )


def test_a_request_goes_on_behind_the_tokens_that_are_here(scene: Scene) -> None:
    live = scene.submit()
    (first,) = scene.requests()
    scene.receive(tokens(first.handle, IDS[:3], started=(Started(handle=first.handle),)))

    scene.now = 107.0
    scene.lose()
    assert not live.is_done
    assert scene.session.num_live == scene.session.num_orphans == 1
    scene.now = 109.0
    scene.connect(engine_id="next")

    (again,) = scene.requests()
    assert again.output.tolist() == IDS[:3]
    assert again.age_s == 9.0
    assert what_is_asked(again) == what_is_asked(first)
    scene.receive(tokens(first.handle, IDS[:3]))  # of the old handle: nobody's
    scene.receive(tokens(again.handle, IDS[3:]))
    scene.receive(tokens(again.handle, [END], Finish.STOP))
    assert live.outputs[0].token_ids == [*IDS, END]
    assert live.outputs[0].text == TOKENIZER.decode(IDS)
    assert (live.failure, live.outputs[0].finish) == (None, Finish.STOP)
    assert scene.session.num_live == 0
    assert scene.session.num_continued == 1


@pytest.mark.parametrize("cut", range(len(IDS) + 3))
def test_the_connection_may_be_lost_after_any_message(scene: Scene, cut: int) -> None:
    """Also while it is cut again and again between."""
    script = [[token] for token in IDS] + [[END]]
    live = scene.submit()
    (request,) = scene.requests()
    for turn, ids in enumerate(script):
        if turn == cut or turn > cut > 2:
            scene.lose()
            scene.connect()
            (request,) = scene.requests()
            assert request.output.tolist() == [token for some in script[:turn] for token in some]
        finish = Finish.STOP if ids == [END] else Finish.NOT_YET
        scene.receive(tokens(request.handle, ids, finish))

    assert live.is_done
    assert live.outputs[0].token_ids == [*IDS, END]
    scene.lose()
    scene.connect()
    assert scene.requests() == []


def test_what_an_engine_held_against_a_request_is_told_to_the_next_until_it_gets_further(
    scene: Scene,
) -> None:
    scene.submit()
    (first,) = scene.requests()
    held = Suspected(handle=first.handle, deaths=("rank 0 died",))
    scene.receive(TokenBatch(handle=int32([]), suspected=(held,)))
    scene.lose()
    scene.connect()
    (second,) = scene.requests()
    assert second.deaths == ("rank 0 died",)

    scene.receive(tokens(second.handle, IDS[:1], suspected=(Suspected(handle=second.handle),)))
    scene.lose()
    scene.connect()
    (third,) = scene.requests()
    assert third.deaths == ()


def ends_of_engines(scene: Scene, *, with_token: bool) -> list[FromClient]:
    """What is sent to the engine after two that have ended, with a token in between or without."""
    scene.connect(suspect_after=2)
    scene.submit()
    (request,) = scene.requests()
    scene.lose()
    scene.connect(suspect_after=2, num_crashes=1)
    (request,) = scene.requests()
    if with_token:
        scene.receive(tokens(request.handle, IDS[:1]))
    scene.lose()
    scene.connect(suspect_after=2, num_crashes=2)
    return scene.sent


def test_a_request_that_was_there_at_two_ends_of_engines_asks_for_its_turn(scene: Scene) -> None:
    (asked,) = ends_of_engines(scene, with_token=False)
    assert isinstance(asked, AskTurn)
    scene.sent.clear()

    scene.receive(YourTurn(asked.handle))
    (request,) = scene.requests()
    assert request.handle == asked.handle


def test_a_token_makes_the_ends_of_engines_before_it_forgotten(scene: Scene) -> None:
    (request,) = ends_of_engines(scene, with_token=True)
    assert isinstance(request, Request)


def test_lost_connections_to_the_same_engine_are_no_ends_of_it(scene: Scene) -> None:
    scene.connect(suspect_after=2)
    scene.submit()
    for _ in range(4):
        scene.lose()
        scene.connect(suspect_after=2)
    assert len(scene.requests()) == 5


def test_a_turn_that_comes_too_late_is_given_back(scene: Scene) -> None:
    (asked,) = ends_of_engines(scene, with_token=False)
    assert isinstance(asked, AskTurn)
    live = scene.session.num_live
    scene.now += 1e6  # it stands in line for as long as it takes,
    scene.keep_time()
    assert scene.session.num_live == live == 1
    scene.session.lose(EngineLost("closed"))  # unless the caller has gone
    scene.sent.clear()
    scene.connect(suspect_after=2, num_crashes=2)

    scene.receive(YourTurn(asked.handle))
    assert scene.aborted() == [asked.handle]


def test_a_request_in_line_ends_by_its_own_time_limit(scene: Scene) -> None:
    scene.connect(suspect_after=1)
    live = scene.submit(timeout_s=30.0)
    scene.lose()
    scene.connect(suspect_after=1, num_crashes=1)
    assert scene.session.next_deadline_s == scene.now + 30.0
    scene.now += 30.0
    scene.keep_time()

    assert live.outputs[0].finish is Finish.TIMEOUT
    assert scene.session.num_live == 0


def test_outputs_that_have_ended_are_not_asked_for_again(scene: Scene) -> None:
    live = scene.submit(n=3, seed=5)
    one, two, three = scene.requests()
    scene.receive(tokens(one.handle, [IDS[0], END], Finish.STOP))
    scene.receive(tokens(two.handle, IDS[:2]))

    scene.lose()
    scene.connect()
    again = scene.requests()

    assert [request.sampling.seed for request in again] == [6, 7]
    assert [request.output.tolist() for request in again] == [IDS[:2], []]
    assert [request.label for request in again] == [two.label, three.label]
    for request in again:
        scene.receive(tokens(request.handle, [END], Finish.STOP))
    assert [output.token_ids for output in live.outputs] == [[IDS[0], END], [*IDS[:2], END], [END]]


def test_a_request_without_a_token_is_older_than_new_ones(scene: Scene) -> None:
    """Whoever it is submitted to knows that it was taken before."""
    scene.submit()
    (first,) = scene.requests()
    assert not first.is_continuation

    scene.lose()
    scene.connect()

    (again,) = scene.requests()
    assert again.is_continuation
    assert what_is_asked(again) == what_is_asked(first)


def test_prompt_logprobs_are_asked_for_until_the_first_token(scene: Scene) -> None:
    live = scene.submit(logprobs=1, prompt_logprobs=1)
    (request,) = scene.requests()
    scene.receive(tokens(request.handle, logprobs=logprob_rows(0, 1, [7, 8])))
    scene.lose()
    scene.connect()
    (request,) = scene.requests()
    assert request.sampling.prompt_logprobs == 1
    at = live.draft.num_prompt
    scene.receive(tokens(request.handle, IDS[:1], logprobs=logprob_rows(0, at, [IDS[0], 3])))

    scene.lose()
    scene.connect()
    (request,) = scene.requests()
    scene.receive(tokens(request.handle, IDS[1:2], logprobs=logprob_rows(0, at + 1, [IDS[1], 4])))

    assert request.sampling.prompt_logprobs is None
    assert request.sampling.logprobs == 1
    entries = live.outputs[0].logprobs
    assert [entry.token_ids for entry in entries if entry] == [(IDS[0], 3), (IDS[1], 4)]


def test_figures_of_the_start_stay_those_of_the_first_time(scene: Scene) -> None:
    live = scene.submit()
    (request,) = scene.requests()
    started = Started(handle=request.handle, num_cached_tokens=4, queue_s=0.5, prefill_s=0.25)
    scene.receive(tokens(request.handle, IDS[:1], started=(started,)))

    scene.lose()
    scene.connect()
    (request,) = scene.requests()
    scene.receive(tokens(request.handle, [END], Finish.STOP))

    output = live.outputs[0]
    assert (output.num_cached_tokens, output.queue_s, output.prefill_s) == (4, 0.5, 0.25)


def test_a_request_is_cancelled_while_it_waits(scene: Scene) -> None:
    live = scene.submit(n=2)
    one, _ = scene.requests()
    scene.receive(tokens(one.handle, IDS[:2]))
    scene.lose()

    assert scene.session.cancel(live) == []
    scene.connect()

    assert scene.requests() == []
    assert [output.finish for output in live.outputs] == [Finish.ABORT] * 2
    assert live.outputs[0].token_ids == IDS[:2]
    assert scene.session.num_live == 0


def test_no_engine_within_recovery_s_is_the_end(scene: Scene) -> None:
    live, done = scene.submit(), scene.submit()
    first, second = scene.requests()
    scene.receive(tokens(first.handle, IDS[:2]))
    scene.receive(tokens(second.handle, [END], Finish.STOP))
    scene.lose()
    assert scene.session.next_deadline_s == 160.0

    scene.now = 159.0
    scene.keep_time()
    assert not live.is_done
    scene.session.wait_for_next(EngineLost("dialled in vain"), scene.now)
    scene.now = 160.0
    scene.keep_time()

    assert isinstance(live.failure, EngineLost)
    assert str(live.failure) == f"{GONE}. No engine went on with it within recovery_s=60"
    assert live.outputs[0].token_ids == IDS[:2]
    assert done.failure is None
    assert scene.session.next_deadline_s is None
    assert scene.session.num_live == 0


def test_a_front_end_that_ends_waits_for_no_other_engine(scene: Scene) -> None:
    live = scene.submit()
    scene.lose()

    scene.session.wait_no_more(scene.now)

    assert str(live.failure) == f"{GONE}. This front end ends, and waits for no other engine"
    assert scene.session.num_live == 0


def test_an_engine_that_stops_again_and_again_is_no_fresh_start(scene: Scene) -> None:
    live = scene.submit()
    for _ in range(6):
        scene.lose()
        scene.now += 10.0
        scene.keep_time()
        scene.connect()

    assert isinstance(live.failure, EngineLost)
    assert len(scene.requests()) == 6


def test_a_token_is_a_fresh_start(scene: Scene) -> None:
    live = scene.submit()
    for token in IDS[:8]:
        scene.receive(tokens(scene.requests()[-1].handle, [token]))
        scene.lose()
        scene.now += 10.0
        scene.keep_time()
        scene.connect()

    assert live.failure is None
    assert scene.requests()[-1].output.tolist() == IDS[:8]


def test_a_connection_that_held_is_a_fresh_start(scene: Scene) -> None:
    live = scene.submit()
    for _ in range(3):
        scene.lose()
        scene.now += 10.0
        scene.keep_time()
        scene.connect()
        scene.now += 61.0  # in the queue

    assert live.failure is None


def test_its_own_time_limit_counts_from_when_it_was_submitted(scene: Scene) -> None:
    waits, ended = scene.submit(timeout_s=30.0), scene.submit(timeout_s=5.0)
    scene.receive(tokens(scene.requests()[1].handle, IDS[:2]))
    scene.now = 103.0
    scene.lose()
    assert scene.session.next_deadline_s == 105.0

    scene.now = 105.0
    scene.keep_time()
    scene.now = 112.0
    scene.connect()

    output = ended.outputs[0]
    assert ended.failure is None
    assert (output.finish, output.message) == (Finish.TIMEOUT, "timeout_s passed")
    assert output.token_ids == IDS[:2]
    (again,) = scene.requests()
    assert (again.timeout_s, again.age_s) == (30.0, 12.0)
    assert not waits.is_done


@pytest.mark.parametrize("reason", ["shutting_down", "no_workers"])
def test_an_engine_that_takes_nothing_is_waited_out(scene: Scene, reason: str) -> None:
    live = scene.submit(n=2)
    scene.requests()
    scene.lose()
    scene.connect()
    one, two = scene.requests()

    scene.receive(tokens(one.handle, IDS[:1]))
    scene.receive(Rejection(handle=two.handle, reason=reason, message="not now"))
    assert not live.is_done
    assert scene.session.num_orphans == 1
    scene.receive(EngineStopping(message="stops"))
    scene.lose()
    scene.connect()

    outputs = {request.label: request.output.tolist() for request in scene.requests()}
    assert outputs == {"mine-0": IDS[:1], "mine-1": []}
    assert scene.session.num_orphans == 0
    assert live.failure is None


def test_an_engine_that_never_takes_it_says_why_at_the_end(scene: Scene) -> None:
    live = scene.submit(n=2)
    scene.lose()
    scene.requests()
    scene.connect()
    one, two = scene.requests()
    scene.receive(Rejection(handle=two.handle, reason="no_workers", message="no group is left"))

    scene.now += 60.0
    scene.keep_time()

    assert isinstance(live.failure, EngineLost)
    assert "no group is left. No engine went on with it" in str(live.failure)
    assert scene.aborted() == [one.handle]
    assert scene.session.num_live == 0


def test_a_new_request_that_is_refused_is_not_kept(scene: Scene) -> None:
    live = scene.submit()
    (request,) = scene.requests()

    scene.receive(Rejection(handle=request.handle, reason="no_workers", message="none"))

    assert isinstance(live.failure, NoWorkers)
    assert scene.session.num_live == 0


def test_another_model_does_not_go_on_with_it(scene: Scene) -> None:
    live = scene.submit()
    scene.requests()
    scene.lose()

    scene.connect(model="another")

    assert scene.requests() == []
    assert isinstance(live.failure, EngineLost)
    assert "serves another now, this was asked of tiny" in str(live.failure)
    new = scene.submit()
    scene.lose()
    scene.connect(model="another", max_model_len=32)
    assert len(scene.requests()) == 2
    assert not new.is_done


def test_what_cannot_recover_fails_at_once() -> None:
    scene = Scene(FrontSession(PROTOCOL_VERSION))
    scene.connect()
    live = scene.submit()

    scene.lose()

    assert live.failure is GONE
    assert scene.session.num_live == 0


def test_the_end_of_the_session_fails_what_waits(scene: Scene) -> None:
    live = scene.submit()
    scene.lose()

    scene.session.lose(EngineLost("closed"))

    assert str(live.failure) == "closed"
    assert scene.session.next_deadline_s is None


def test_stop_strings_and_text_go_on_over_the_gap(scene: Scene) -> None:
    """Also a string of which one half came before and the other after."""
    whole = TOKENIZER.decode(IDS)
    stop = whole[whole.index("ox j") : whole.index("ox j") + 4]
    live = scene.submit(stop=[stop])
    (request,) = scene.requests()
    for token in IDS:
        if live.is_done:
            break
        scene.receive(tokens(request.handle, [token]))
        if not live.is_done:
            scene.lose()
            scene.connect()
            (request,) = scene.requests()

    assert live.outputs[0].text == whole[: whole.index(stop)]
    assert live.outputs[0].stop_reason == stop
    assert scene.aborted() == [request.handle]


class ScriptedEngine:
    """Answers each live request of a session with the next tokens of its answer, some at a time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left: dict[int, list[int]] = {}

    def take(self, messages: list[FromClient]) -> None:
        for message in messages:
            if isinstance(message, Request):
                answer = answer_of(message)
                assert answer[: len(message.output)] == message.output.tolist(), "it said otherwise"
                self._left[message.handle] = answer[len(message.output) :]
                assert self._left[message.handle], "it had ended"
            elif isinstance(message, Abort):
                for handle in message.handle.tolist():
                    self._left.pop(handle, None)

    def step(self) -> TokenBatch | None:
        handles = [handle for handle in self._left if self._rng.random() < 0.7]
        if not handles:
            return None
        rows = {handle: self._left[handle][: self._rng.randrange(0, 3)] for handle in handles}
        ends = {handle: len(rows[handle]) == len(self._left[handle]) for handle in handles}
        for handle, row in rows.items():
            self._left[handle] = self._left[handle][len(row) :]
            if ends[handle]:
                del self._left[handle]
        finish = [Finish.LENGTH if ends[handle] else Finish.NOT_YET for handle in handles]
        return TokenBatch(
            handle=int32(handles),
            count=int32([len(rows[handle]) for handle in handles]),
            token=int32([token for handle in handles for token in rows[handle]]),
            finish=int32(finish).astype("uint8"),
        )


def answer_of(request: Request) -> list[int]:
    """A function of its seed, as of any engine."""
    rng = random.Random(request.sampling.seed)
    assert request.sampling.max_tokens is not None
    return [rng.choice(IDS) for _ in range(request.sampling.max_tokens)]


@pytest.mark.parametrize("seed", range(12))
def test_through_any_number_of_losses_each_token_comes_once(seed: int) -> None:
    rng = random.Random(seed)
    scene, engine = Scene(), ScriptedEngine(rng)
    scene.connect()
    lives: list[LiveRequest] = []
    cancelled: list[LiveRequest] = []
    while len(lives) < 20 or scene.session.num_live:
        scene.now += rng.random()
        if scene.session.info is None:
            scene.keep_time()
            if rng.random() < 0.5:
                engine = ScriptedEngine(rng)
                scene.connect()
        elif rng.random() < 0.25:
            scene.lose()
        elif len(lives) < 20 and rng.random() < 0.3:
            lives.append(
                scene.submit(n=rng.randrange(1, 4), seed=len(lives), max_tokens=rng.randrange(1, 9))
            )
        elif lives and rng.random() < 0.03:
            victim = rng.choice(lives)
            if not victim.is_done:
                scene.sent += scene.session.cancel(victim)
                cancelled.append(victim)
        if scene.session.info is not None:
            engine.take(scene.sent)
            if batch := engine.step():
                scene.receive(batch)
                engine.take([m for m in scene.sent if isinstance(m, Abort)])
        scene.sent.clear()

    for live in lives:
        assert live.failure is None
        for index, output in enumerate(live.outputs):
            answer = answer_of(live.draft.continuation(1, index, (), 0.0))
            assert output.token_ids == answer[: len(output.token_ids)]
            assert output.token_ids == answer or live in cancelled
    assert scene.session.num_continued > 20
