"""Every order in which front ends meet engines that end of a request, for small sizes.

The sessions and the turns are the real ones; the engine and the connections are played.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from cluster.frontend.draft import RequestOptions, draft_of
from cluster.frontend.errors import EngineLost
from cluster.frontend.requests import LiveOutput, LiveRequest
from cluster.frontend.session import FrontSession
from cluster.messages.clients import AskTurn, YourTurn
from cluster.messages.sockets import FromClient
from cluster.turns import Turns
from cluster.wire import PROTOCOL_VERSION
from scheduler.request import Abort, Finish, Request
from scheduler.sampling import SamplingParams
from tests.cluster.frontend.fake_engine import make_info, tokens

Event = tuple[str, int]

NOW = 100.0
POISON = (666,)
"""A prompt of which engines end."""
GONE = EngineLost("the connection ended")
OUTPUT_LEN = 2
MOST_DUTIES = 60


@dataclass
class World:
    """Clients with prompts, and one engine after the other. Each step of it is an event."""

    prompts: tuple[tuple[tuple[int, ...], ...], ...]
    """Of each client"""
    suspect_after: int = 2
    num_accidents: int = 0
    """Ends of engines that no request caused, which may still come"""
    num_cuts: int = 0
    """Connections that may still be cut. The client dials again before the engine can end: else it
    could not know that it was not there at that end."""
    num_poisonings: int = 0
    num_crashes: int = 0
    turns: Turns = field(default_factory=Turns)
    taken: list[tuple[int, Request]] = field(default_factory=list)
    """By the engine: the client of each request"""
    connected: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sessions = [FrontSession(PROTOCOL_VERSION, recovery_s=60.0) for _ in self.prompts]
        self.lives: list[LiveRequest] = []
        for client, prompts in enumerate(self.prompts):
            self.do(("connect", client))
            for prompt in prompts:
                draft = draft_of(
                    {"prompt_token_ids": list(prompt)},
                    SamplingParams(max_tokens=OUTPUT_LEN),
                    RequestOptions(),
                    info=make_info(vocab_size=1000),
                    tokenizer=None,
                    seed=1,
                    request_id="r",
                )
                live, sent = self.sessions[client].submit(draft, NOW)
                self.lives.append(live)
                self.take(client, sent)

    def take(self, client: int, sent: list[FromClient]) -> None:
        """What the engine is sent."""
        for message in sent:
            match message:
                case Request():
                    self.taken.append((client, message))
                case AskTurn(handle=handle):
                    self.turns.ask(client, handle)
                case Abort():
                    self.turns.over(client, message.handle)
        while (turn := self.turns.begin()) is not None:
            owner, handle = turn
            self.take(owner, self.sessions[owner].receive(YourTurn(handle), NOW))

    def duties(self) -> list[Event]:
        """What comes to pass if nothing more goes wrong."""
        found = [("compute", at) for at in range(len(self.taken))]
        found += [("connect", at) for at in range(len(self.prompts)) if at not in self.connected]
        return found

    def accidents(self) -> list[Event]:
        found = [("accident", 0)] if self.num_accidents else []
        return found + [("cut", client) for client in self.connected if self.num_cuts]

    def do(self, event: Event) -> None:
        kind, at = event
        match kind:
            case "connect":
                self.connected.add(at)
                info = make_info(
                    num_crashes=self.num_crashes,
                    suspect_after=self.suspect_after,
                    last_crash="signal 11",
                    vocab_size=1000,
                )
                self.take(at, self.sessions[at].receive(info, NOW))
            case "compute":
                self.compute(*self.taken.pop(at))
            case "accident":
                self.num_accidents -= 1
                self.crash()
            case "cut":
                self.num_cuts -= 1
                self.lose(at)
                self.turns.left(at)
                self.taken = [(owner, one) for owner, one in self.taken if owner != at]
                self.do(("connect", at))

    def compute(self, client: int, request: Request) -> None:
        """One token."""
        if tuple(request.prompt.tolist()) == POISON:
            self.num_poisonings += 1
            self.crash()
            return
        (output,) = [
            output
            for live, output in self.outputs()
            if output.handle == request.handle and self.client_of(live) == client
        ]
        is_last = len(output.token_ids) + 1 == OUTPUT_LEN
        finish = Finish.LENGTH if is_last else Finish.NOT_YET
        self.sessions[client].receive(tokens(request.handle, [5], finish), NOW)
        if not is_last:
            self.taken.append((client, request))
        self.turns.over(client, (request.handle,))
        self.take(client, [])

    def crash(self) -> None:
        self.num_crashes += 1
        self.turns, self.taken = Turns(), []
        for client in sorted(self.connected):
            self.lose(client)

    def lose(self, client: int) -> None:
        self.connected.remove(client)
        self.sessions[client].wait_for_next(GONE, NOW)

    def outputs(self) -> list[tuple[LiveRequest, LiveOutput]]:
        return [(live, output) for live in self.lives for output in live.outputs if output.is_live]

    def client_of(self, live: LiveRequest) -> int:
        at = next(at for at, other in enumerate(self.lives) if other is live)
        return [client for client, prompts in enumerate(self.prompts) for _ in prompts][at]

    def digest(self) -> object:
        """Two worlds of the same digest go on the same way."""
        names = {
            (self.client_of(live), output.handle): at
            for at, live in enumerate(self.lives)
            for output in live.outputs
        }
        queue = [*self.turns._waiting, self.turns._now]
        return (
            self.num_accidents,
            self.num_cuts,
            self.num_poisonings,
            tuple(sorted(self.connected)),
            tuple(names.get((client, request.handle)) for client, request in self.taken),
            tuple(names.get(turn) if turn else None for turn in queue),
            tuple(
                (
                    len(output.token_ids),
                    output.finish,
                    output.presence.num_crashes,
                    output.presence._known is not None,
                    (output.presence._known or 0) == self.num_crashes,
                    output.presence._has_turn,
                )
                for live in self.lives
                for output in live.outputs
            ),
        )

    def check(self, *, is_over: bool = False) -> None:
        for live in self.lives:
            (output,) = live.outputs
            is_poison = tuple(live.draft.prompt_token_ids) == POISON
            ends = {Finish.ERROR} if is_poison else {Finish.LENGTH}
            assert output.finish in (ends if is_over else ends | {Finish.NOT_YET})


def explore(make: Callable[[], World], *, is_fair: bool) -> tuple[int, int]:
    """Look at every order; returns the number of states, and of ends by poison at most."""

    def played(history: tuple[Event, ...]) -> World:
        world = make()
        for event in history:
            world.do(event)
        return world

    seen, most = {make().digest()}, 0
    frontier: deque[tuple[Event, ...]] = deque([()])
    while frontier:
        history = frontier.popleft()
        world = played(history)
        events = world.duties() + world.accidents()
        for _ in range(MOST_DUTIES):
            if not world.duties():
                break
            world.do(world.duties()[0])
        assert not world.outputs(), f"it does not come to rest after {history}"
        if is_fair:
            world.check(is_over=True)
        most = max(most, world.num_poisonings)
        for event in events:
            world = played((*history, event))
            if is_fair:
                world.check()
            if (digest := world.digest()) not in seen:
                seen.add(digest)
                frontier.append((*history, event))
    return len(seen), most


A, B, C = (1,), (2,), (3,)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("prompts", "num_cuts"),
    [
        (((POISON,),), 1),
        (((POISON, A),), 1),
        (((A,), (POISON,)), 0),
        pytest.param(((A,), (POISON,)), 1, marks=pytest.mark.slow),
        pytest.param(((A, POISON), (B,)), 0, marks=pytest.mark.slow),
        pytest.param(((A, POISON), (B, C)), 0, marks=pytest.mark.slow),
        pytest.param(((A, POISON), (B,)), 1, marks=pytest.mark.slow),
    ],
)
def test_the_request_of_which_engines_end_is_refused_after_the_third_and_nobody_else_is(
    prompts: tuple[tuple[tuple[int, ...], ...], ...], num_cuts: int
) -> None:
    num_states, most = explore(lambda: World(prompts, num_cuts=num_cuts), is_fair=True)
    assert num_states > 5
    assert most == 3


@pytest.mark.slow
def test_engines_that_end_of_nothing_twice_cost_nobody_its_request() -> None:
    explore(lambda: World(((A,), (B,)), num_accidents=2), is_fair=True)


@pytest.mark.parametrize(
    "prompts", [((POISON,),), pytest.param(((POISON,), (B,)), marks=pytest.mark.slow)]
)
def test_every_request_comes_to_an_end_when_engines_end_of_one_and_of_nothing(
    prompts: tuple[tuple[tuple[int, ...], ...], ...],
) -> None:
    _, most = explore(lambda: World(prompts, num_accidents=1), is_fair=False)
    assert most <= 3


def test_nobody_is_suspected_where_that_is_switched_off() -> None:
    world = World(((POISON,),), suspect_after=0)
    for number in range(5):
        world.do(("compute", 0))
        world.do(("connect", 0))
        assert (world.num_poisonings, len(world.taken)) == (number + 1, 1)
