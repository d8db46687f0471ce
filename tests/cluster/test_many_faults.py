"""Fault after fault on the real engine and real sockets, with scripted ranks in threads: so many
that losses fall on starts, on other losses and on every moment of a stream."""

import random
import threading
import time
from pathlib import Path

import pytest

from cluster import groups
from cluster.errors import LinkLost
from cluster.messages.faults import Fault, FaultInjected, FaultKind, InjectFault
from cluster.messages.reports import Status
from cluster.messages.supervisor import GroupLost, GroupStopped, StartGroup
from cluster.wire import FROM_ENGINE
from scheduler.request import Finish
from tests.cluster.cluster_rig import Rig, TestClient, TestSupervisor, wait_for_status
from tests.cluster.scripted import tokens_after

NUM_GROUPS, NUM_RANKS, NUM_CALLERS, AT_ONCE = 2, 2, 3, 4

KINDS: tuple[FaultKind, ...] = ("raise", "cut", "drop", "miss", "delay", "slow", "full")


class Keeper:
    """Starts and ends scripted ranks as the engine tells the supervisor."""

    def __init__(self, rig: Rig, supervisor: TestSupervisor) -> None:
        self._rig, self._supervisor = rig, supervisor
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        for group in range(NUM_GROUPS):
            self._start(group, 1)

    def _start(self, group: int, epoch: int) -> None:
        for rank in range(NUM_RANKS):
            self._rig.start_worker(group=group, epoch=epoch, rank=rank)

    def _run(self) -> None:
        while True:
            try:
                frame = self._supervisor.link.receive(None)
            except LinkLost:
                return
            assert frame is not None
            match FROM_ENGINE.decode(frame):
                case GroupLost(group=group, epoch=epoch):
                    for rank in range(NUM_RANKS):
                        self._rig.join_worker(f"{group}.{epoch}.{rank}")
                    self._supervisor.send(GroupStopped(group, epoch))
                case StartGroup(group=group, epoch=epoch):
                    self._start(group, epoch)

    def join(self) -> None:
        self._thread.join(20)


class Caller:
    """Asks for streams without pause; notes each that is not what it should be."""

    def __init__(self, rig: Rig, seed: int, has_ended: threading.Event) -> None:
        self._client, self._has_ended = rig.client(), has_ended
        self._chance = random.Random(seed)
        self.num_streams = 0
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._has_ended.is_set():
            asked = {}
            for _ in range(AT_ONCE):
                shape = self._chance.randint(1, 60), self._chance.randint(1, 120)
                asked[self._client.submit(*shape)] = shape
            self._client.finish(*asked)
            for handle, shape in asked.items():
                self._judge(handle, *shape)

    def _judge(self, handle: int, num_prompt: int, max_tokens: int) -> None:
        self.num_streams += 1
        got, wanted = self._client.tokens.get(handle, []), tokens_after(num_prompt, max_tokens)
        if got != wanted or self._client.ends.get(handle) != Finish.LENGTH:
            refusal = self._client.rejections.get(handle)
            self.wrong.append(f"{len(got)} of {len(wanted)} tokens, {refusal}")

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "a stream does not end"


def is_whole(status: Status) -> bool:
    return all(group.state == "ready" for group in status.groups)


def break_something(client: TestClient, chance: random.Random) -> bool:
    """Order one fault; whether somebody was there to be hit."""
    fault = Fault(kind=chance.choice(KINDS), seconds=chance.uniform(0.0, 0.02), count=3)
    rank = chance.randrange(NUM_RANKS)
    client.send(InjectFault(fault=fault, group=chance.randrange(NUM_GROUPS), rank=rank))
    return not client.next_of(FaultInjected).refusal


@pytest.mark.parametrize(
    "num_faults", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_no_stream_ends_and_no_token_is_lost_or_doubled(
    num_faults: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "EXPLANATION_S", 0.1)  # nobody says how a rank's thread ended
    chance, has_ended = random.Random(num_faults), threading.Event()
    with Rig(
        tmp_path,
        num_groups=NUM_GROUPS,
        num_ranks=NUM_RANKS,
        max_restarts=1_000_000,
        step_timeout_s=1.0,
        allow_chaos=True,
    ) as rig:
        keeper = Keeper(rig, rig.supervisor())
        client = rig.client()
        wait_for_status(client, is_whole)
        callers = [Caller(rig, seed, has_ended) for seed in range(NUM_CALLERS)]
        num_hit = 0
        while num_hit < num_faults:
            num_hit += break_something(client, chance)
            time.sleep(chance.uniform(0.0, 0.05))
        has_ended.set()
        for caller in callers:
            caller.join()
        status = wait_for_status(client, is_whole)
    keeper.join()

    assert [caller.wrong for caller in callers] == [[]] * NUM_CALLERS
    assert min(caller.num_streams for caller in callers) > 0
    assert sum(group.epoch for group in status.groups) > num_faults // 10
    assert [group.num_used_blocks for group in status.groups] == [0] * NUM_GROUPS
