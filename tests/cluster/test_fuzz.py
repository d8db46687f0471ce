"""Whatever reaches either socket, the engine lives and others are served.

The engine is a process of its own with encrypted tcp:// sockets; its workers are scripted, so
that each token is known beforehand. Strangers come in three kinds: without keys, with a key but
without the engine's secret, and workers of ours that have gone mad.
"""

import contextlib
import itertools
import os
import pickle
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgpack
import msgspec
import numpy as np
import pytest
import zmq

from cluster.errors import LinkLost
from cluster.keys import ClientKeys
from cluster.links.dealer import DealerLink
from cluster.links.sockets import LinkLimits, fresh_keys
from cluster.messages.clients import ClientHello, Refusal
from cluster.messages.reports import Status, StatusRequest
from cluster.messages.supervisor import GroupLost, GroupReady, GroupStopped, Shutdown, StartGroup
from cluster.messages.workers import (
    PoolSize,
    RankCapacity,
    Stop,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
)
from cluster.wire import FROM_CLIENT, FROM_ENGINE, PROTOCOL_VERSION, TO_ENGINE
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Finish, Request
from tests.cluster import test_wire
from tests.cluster.cluster_rig import KEY, Rig, TestClient, TestSupervisor, wait_for_status
from tests.cluster.scripted import Script, tokens_after

TCP = "tcp://127.0.0.1:0"
LIMITS = LinkLimits(max_message_bytes=64 << 20)
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 14))]
DEEP = [150, pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(
        tmp_path,
        front_address=TCP,
        back_address=TCP,
        front_keys=fresh_keys(),
        back_keys=fresh_keys(),
        has_own_process=True,
        num_groups=2,
        max_restarts=1000,
        max_num_seqs=32,
    ) as rig:
        rig.start_worker(Script(num_blocks=512, step_s=0.001))
        rig.client().close()  # which waits until it is ready
        yield rig


class Neighbour:
    """A client that is answered all the while, and knows each token that it must get."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._is_over = threading.Event()
        self._wrong: list[object] = []
        self.num_answers = 0
        self._thread = threading.Thread(target=self._ask_on)

    def __enter__(self) -> "Neighbour":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(60.0)
        assert not self._thread.is_alive(), "the neighbour waits for an answer"
        assert not self._wrong
        assert self.num_answers > 0

    def _ask_on(self) -> None:
        try:
            client = self._rig.client()
            while not (self._is_over.is_set() and self.num_answers):
                handles = [client.submit(num_prompt=n, max_tokens=12) for n in (3, 20, 70)]
                client.finish(*handles)
                for handle, length in zip(handles, (3, 20, 70), strict=True):
                    if client.tokens.get(handle) != tokens_after(length, 12):
                        self._wrong.append((length, client.tokens.get(handle)))
                    self.num_answers += 1
            client.close()
        except Exception as error:
            self._wrong.append(error)


class Exploit:
    """What a pickle can do: it makes a folder where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._mark),)


ODD_VALUES = (None, True, -1, 0, 2**31, 2**63, -(2**63), 1.5, float("nan"), "", "x" * 300, b"",
              b"\x00" * 7, b"\xff" * 4000, [], [[]] * 50, {}, {"type": "x"}, {1: 2})  # fmt: skip


class Mutator:
    """Turns good frames into what a bad peer could send."""

    def __init__(self, seed: int, good: Sequence[bytes]) -> None:
        self._chance = random.Random(seed)
        self._good = good

    def frames(self, count: int) -> Iterator[bytes]:
        kinds = (self._noise, self._cut, self._flipped, self._odd_field, self._lost_field,
                 self._grown, self._good_one)  # fmt: skip
        return (self._chance.choice(kinds)() for _ in range(count))

    def _good_one(self) -> bytes:
        return self._chance.choice(self._good)

    def _noise(self) -> bytes:
        return self._chance.randbytes(self._chance.randrange(400))

    def _cut(self) -> bytes:
        frame = self._good_one()
        return frame[: self._chance.randrange(len(frame))]

    def _flipped(self) -> bytes:
        frame = bytearray(self._good_one())
        for _ in range(self._chance.randrange(1, 5)):
            frame[self._chance.randrange(len(frame))] = self._chance.randrange(256)
        return bytes(frame)

    def _odd_field(self) -> bytes:
        message = msgpack.unpackb(self._good_one(), strict_map_key=False)
        at, name = message, self._chance.choice(list(message))
        if isinstance(message[name], dict) and message[name] and self._chance.random() < 0.7:
            at, name = message[name], self._chance.choice(list(message[name]))
        at[name] = self._chance.choice(ODD_VALUES)
        return bytes(msgpack.packb(message))

    def _lost_field(self) -> bytes:
        message = msgpack.unpackb(self._good_one(), strict_map_key=False)
        del message[self._chance.choice(list(message))]
        return bytes(msgpack.packb(message))

    def _grown(self) -> bytes:
        return self._good_one() + self._chance.randbytes(self._chance.randrange(1, 50))


def good_from_clients() -> list[bytes]:
    """One of each message, and requests that would do if they were let alone."""
    hello = ClientHello(protocol=PROTOCOL_VERSION)
    requests = [
        msgspec.structs.replace(each, handle=handle)
        for each in test_wire.FROM_CLIENT
        if isinstance(each, Request)
        for handle in (1, 2, 3)
    ]
    return [FROM_CLIENT.encode(each) for each in (hello, *test_wire.FROM_CLIENT, *requests)]


def good_to_engine() -> list[bytes]:
    return [TO_ENGINE.encode(each) for each in test_wire.TO_ENGINE]


def pickles(mark: Path) -> list[bytes]:
    return [pickle.dumps(Exploit(mark), protocol) for protocol in range(6)]


def send_all(
    address: str,
    keys: ClientKeys | None,
    frames: Iterator[bytes],
    *,
    first: bytes = b"",
    before_end: Callable[[int], object] = lambda num_sent: None,
) -> int:
    """Send frames over a few connections, which end in between; the number that was sent.

    Args:
        before_end: told of the number so far whenever a connection is about to end. A TCP socket
            that is closed while answers lie in it takes with it what the other end has not read.
    """
    num_sent = 0
    link: DealerLink | None = None
    for frame in frames:
        if link is None:
            link = DealerLink(address, LIMITS, keys)
            link.wait_connected(20.0)
            if first:
                link.send(first)
        link.send(frame)
        num_sent += 1
        with contextlib.suppress(LinkLost):
            link.take()
        if num_sent % 40 == 0:
            before_end(num_sent)
            link.close(linger_s=5.0)
            link = None
    if link is not None:
        before_end(num_sent)
        link.close(linger_s=5.0)
    return num_sent


def check_unharmed(rig: Rig) -> Status:
    """The engine answers somebody new, and holds nothing for those who are gone."""
    client = rig.client()
    client.finish(handle := client.submit(num_prompt=9, max_tokens=9))
    assert client.tokens[handle] == tokens_after(9, 9)
    return wait_for_status(
        client,
        lambda status: (
            status.num_running + status.num_waiting == 0
            and sum(group.num_used_blocks for group in status.groups) == 0
            and status.num_clients == 1
        ),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", DEEP)
@pytest.mark.parametrize("says_hello", [True, False])
def test_case_119_clients_that_send_anything_harm_nobody_and_run_nothing(
    rig: Rig, tmp_path: Path, seed: int, count: int, says_hello: bool
) -> None:
    mark = tmp_path / "ran"
    good = good_from_clients()
    with Neighbour(rig):
        noise = Mutator(seed, good).frames(count)
        send_all(rig.front, rig.front_keys, noise, first=good[0] if says_hello else b"")
        num_pickles = send_all(rig.front, rig.front_keys, iter(pickles(mark)))
        rig_client = rig.client()
        wait_for_status(rig_client, lambda status: status.totals.num_dropped >= num_pickles)
        rig_client.close()
    check_unharmed(rig)
    assert not mark.exists()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", DEEP)
def test_case_119_strangers_at_the_back_socket_are_dropped_each_time(
    rig: Rig, tmp_path: Path, seed: int, count: int
) -> None:
    """They hold the link's key, as a program on one of the nodes could, and no more."""
    mark = tmp_path / "ran"
    client = rig.client()

    def wait_dropped(count: int) -> None:
        wait_for_status(client, lambda status: status.totals.num_dropped >= count)

    frames = itertools.chain(Mutator(seed, good_to_engine()).frames(count), pickles(mark))
    with Neighbour(rig):
        num_sent = send_all(rig.back, rig.back_keys, frames, before_end=wait_dropped)
        status = client.status()
        client.close()
    assert status.totals.num_dropped == num_sent
    check_unharmed(rig)
    assert not mark.exists()


@pytest.mark.parametrize("side", ["front", "back"])
def test_case_119_frames_over_the_limit_end_their_connection_only(rig: Rig, side: str) -> None:
    address, keys = (rig.front, rig.front_keys) if side == "front" else (rig.back, rig.back_keys)
    assert rig.process is not None
    with Neighbour(rig):
        before = rig.process.memory_info().rss
        with DealerLink(address, LIMITS, keys) as link:
            link.wait_connected(20.0)
            link.send(bytes(100 << 20))
            with pytest.raises(LinkLost):
                link.receive(30.0)
        assert rig.process.memory_info().rss < before + (100 << 20)
    check_unharmed(rig)


def insider_hellos() -> list[WorkerHello | WorkerFailed]:
    """What holders of the engine's secret may say at the wrong time or of the wrong rank."""
    hello = WorkerHello(
        protocol=PROTOCOL_VERSION,
        engine_id="engine",
        key=KEY,
        group=1,
        epoch=1,
        rank=0,
        capacity=test_wire.CAPACITY,
    )
    change = msgspec.structs.replace
    wrong = [{"group": 0}, {"group": 2}, {"group": -1}, {"group": 2**40}, {"rank": 1}, {"rank": -1}]
    wrong += [{"epoch": 0}, {"epoch": 2}, {"epoch": -1}, {"epoch": 2**60}]
    failed = WorkerFailed(group=0, epoch=7, rank=0, message="not me", key=KEY)
    return [
        *(change(hello, **fields) for fields in wrong),
        *(change(failed, **fields) for fields in ({}, {"epoch": -1}, {"group": 9}, {"group": -1})),
    ]


def test_hellos_of_the_wrong_rank_group_or_epoch_change_nothing(rig: Rig) -> None:
    with Neighbour(rig):
        for message in insider_hellos():
            with DealerLink(rig.back, LIMITS, rig.back_keys) as link:
                link.wait_connected(20.0)
                link.send(TO_ENGINE.encode(message))
                if isinstance(message, WorkerHello):
                    answer = FROM_ENGINE.decode(link.receive(20.0) or b"")
                    assert isinstance(answer, Refusal), message
    status = check_unharmed(rig)
    assert [group.state for group in status.groups] == ["ready", "starting"]


def test_a_second_supervisor_is_refused_and_its_end_ends_nothing(rig: Rig) -> None:
    rig.supervisor().next_of(GroupReady)
    with Neighbour(rig):
        second = TestSupervisor(rig.back, KEY, rig.back_keys)
        assert "already" in second.next_of(Refusal).message
        second.send(Shutdown(drain_s=0.0))
        second.close()
    check_unharmed(rig)


class MadWorker:
    """The rank of group 1: it answers plans with what a mutator makes of the right answer."""

    def __init__(self, rig: Rig, chance: random.Random, epoch: int) -> None:
        self._chance, self._epoch = chance, epoch
        self._link = DealerLink(rig.back, LIMITS, rig.back_keys)
        self._link.wait_connected(20.0)
        self._old: list[bytes] = []

    def run(self) -> None:
        """Come up, and answer until the group is lost."""
        hello = msgspec.structs.replace(
            insider_hellos()[0], group=1, rank=0, epoch=self._epoch, capacity=ROOMY
        )
        self._link.send(TO_ENGINE.encode(hello))
        with contextlib.suppress(LinkLost):
            while True:
                frame = self._link.receive(30.0)
                assert frame is not None, "the engine neither plans nor ends"
                message = FROM_ENGINE.decode(frame)
                match message:
                    case PoolSize():
                        self._link.send(TO_ENGINE.encode(WorkerReady()))
                    case StepPlan():
                        self._answer(message)
                    case Stop() | Refusal():
                        break
        self._link.close()

    def _answer(self, plan: StepPlan) -> None:
        count = int(plan.samples.sum()) if len(plan.samples) else len(plan.slot)
        good = StepResult(epoch=plan.epoch, step=plan.step, token=np.full(count, 5, dtype="<i4"))
        change = msgspec.structs.replace
        wrong: list[Callable[[], bytes]] = [
            lambda: TO_ENGINE.encode(change(good, step=plan.step + 1)),
            lambda: TO_ENGINE.encode(change(good, step=-(2**31))),
            lambda: TO_ENGINE.encode(change(good, token=np.zeros(count + 1, dtype="<i4"))),
            lambda: TO_ENGINE.encode(change(good, epoch=plan.epoch + 1)),
            lambda: TO_ENGINE.encode(change(good, logprobs=test_wire.ROWS)),
            lambda: TO_ENGINE.encode(change(good, compute_s=float("nan"))),
            lambda: TO_ENGINE.encode(WorkerReady()),
            lambda: TO_ENGINE.encode(Shutdown(drain_s=0.0)),
            lambda: self._chance.choice(self._old or [b"?"]),
            lambda: self._chance.randbytes(50),
        ]
        for _ in range(self._chance.randrange(1, 4)):
            self._link.send(self._chance.choice(wrong)())
        frame = TO_ENGINE.encode(good)
        self._old.append(frame)
        self._link.send(frame)


ROOMY = RankCapacity(
    num_blocks=512, block_bytes=1024, vocab_size=1000, max_model_len=256, device="mad"
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_lives", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_worker_that_has_gone_mad_loses_its_group_and_nobody_else(
    rig: Rig, seed: int, num_lives: int
) -> None:
    """Its own streams may get its tokens until then; no request is lost, no other group hurt."""
    chance = random.Random(seed)
    supervisor = rig.supervisor()
    client = rig.client()
    for epoch in range(1, num_lives + 1):
        mad = threading.Thread(target=MadWorker(rig, chance, epoch).run)
        mad.start()
        wait_for_status(client, lambda status: status.groups[1].state != "starting")
        ask_until_lost(client, supervisor, epoch)
        mad.join(30.0)
        supervisor.send(GroupStopped(1, epoch))
        assert supervisor.next_of(StartGroup).epoch == epoch + 1
    status = check_unharmed_by(client)
    assert (status.groups[0].state, status.groups[0].epoch) == ("ready", 1)


def ask_until_lost(client: TestClient, supervisor: TestSupervisor, epoch: int) -> None:
    """Give both groups work until the mad one has made its last mistake."""
    while client.status().groups[1].state in ("sizing", "ready"):
        handles = [client.submit(num_prompt=5, max_tokens=30) for _ in range(12)]
        client.finish(*handles)
        assert {client.ends[handle] for handle in handles} == {Finish.LENGTH}
        assert {len(client.tokens[handle]) for handle in handles} == {30}
    lost = supervisor.next_of(GroupLost)
    assert (lost.group, lost.epoch, lost.restarts) == (1, epoch, True)


def check_unharmed_by(client: TestClient) -> Status:
    client.finish(handle := client.submit(num_prompt=9, max_tokens=9))
    assert client.tokens[handle] == tokens_after(9, 9)
    return client.status()


def port_of(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port)


@contextlib.contextmanager
def connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(socket.create_connection(port_of(address), 20.0))
            for _ in range(count)
        ]


GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
"""ZMTP 3.1 (ZeroMQ RFC 37): signature; then version, mechanism, as-server, filler."""


def plain_greeting() -> bytes:
    return GREETING + b"\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)


def curve_greeting() -> bytes:
    return GREETING + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)


def first_words(chance: random.Random) -> list[bytes]:
    """What those say who do not speak ZeroMQ, or not for long."""
    hello = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + chance.randbytes(120)
    return [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        chance.randbytes(300),
        GREETING,
        plain_greeting(),
        plain_greeting() + b"\x00\x05hello",
        curve_greeting(),
        curve_greeting() + hello,
        curve_greeting() + b"\x06\xff\xff\xff\xff\xff\xff\xff\xff",
        curve_greeting() + b"\x02\xff\xff\xff\xff\xff\xff\xff\xff" + bytes(1000),
        pickle.dumps(Exploit(Path("/nowhere/at/all"))),
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_connections_that_say_little_or_nothing_keep_nobody_out(
    rig: Rig, seed: int, count: int
) -> None:
    chance = random.Random(seed)
    with Neighbour(rig):
        with connections(rig.front, count) as front, connections(rig.back, count) as back:
            for number, quiet in enumerate(front + back):
                if number % 3:
                    words = chance.choice(first_words(chance))
                    with contextlib.suppress(OSError):
                        quiet.sendall(words[: chance.randrange(1, len(words) + 1)])
            late = rig.client()
            late.finish(handle := late.submit(num_prompt=9, max_tokens=9))
            assert late.tokens[handle] == tokens_after(9, 9)
        wait_for_status(late, lambda status: status.totals.num_turned_away == 2 * count)
        late.close()
    check_unharmed(rig)


@pytest.mark.parametrize("side", ["front", "back"])
def test_peers_without_the_sockets_own_keys_are_turned_away_and_counted(
    rig: Rig, side: str
) -> None:
    address, keys, others = rig.front, rig.front_keys, rig.back_keys
    if side == "back":
        address, keys, others = rig.back, rig.back_keys, rig.front_keys
    assert keys is not None
    assert others is not None
    strangers = {
        "without a key": None,
        "hangs up in the handshake": others,
        "refuses our key": msgspec.structs.replace(others, server=keys.server),
    }
    with Neighbour(rig):
        asking = rig.client()
        for number, (why, shown) in enumerate(strangers.items(), 1):
            for _ in range(5):
                with DealerLink(address, LIMITS, shown) as link:
                    link.send(FROM_CLIENT.encode(StatusRequest()))
                    with pytest.raises(LinkLost, match=why):
                        link.wait_connected(0.2 if others is shown else 5.0)
            wait_for_status(
                asking,
                lambda status, n=number: status.totals.num_turned_away >= 5 * n,  # type: ignore[misc]
            )
        asking.close()
    assert check_unharmed(rig).totals.num_dropped == 0


def test_a_plain_publisher_or_any_other_kind_of_socket_gets_nowhere(rig: Rig) -> None:
    kinds = (zmq.PUB, zmq.SUB, zmq.REQ, zmq.REP, zmq.PUSH, zmq.PULL, zmq.PAIR, zmq.ROUTER)
    assert rig.front_keys is not None
    with Neighbour(rig), zmq.Context() as context:
        for kind in kinds:
            with context.socket(kind) as odd:
                odd.linger = 0
                odd.curve_serverkey = rig.front_keys.server.encode()
                odd.curve_publickey = rig.front_keys.public.encode()
                odd.curve_secretkey = rig.front_keys.secret.encode()
                odd.connect(rig.front)
                with contextlib.suppress(zmq.ZMQError):
                    odd.send(b"hello", zmq.NOBLOCK)
    check_unharmed(rig)
