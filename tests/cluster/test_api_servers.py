"""API servers share one port, and one that dies is started again."""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.api_servers import ApiServers
from cluster.errors import StartFailed
from cluster.http_config import HttpConfig
from cluster.listener import Listener
from cluster.logs import EventLog

WAIT_S = 30.0

ECHO = """
import json, os, socket, sys
launch = json.load(sys.stdin)
print("up", flush=True)
listener = socket.socket(fileno=launch["listen_fd"])
while True:
    connection, _ = listener.accept()
    connection.sendall(f'{launch["number"]} {os.getpid()} {launch["front_address"]}'.encode())
    connection.close()
"""
"""An API server that answers each connection with its number, and knows no end of its own."""

FAILS_ONCE_THERE_IS = """
import os
if os.path.exists({path!r}):
    raise SystemExit(4)
"""
"""Before it: one of which new processes do not start."""


class Rig:
    def __init__(self, num: int, program: str = ECHO) -> None:
        self.listener = Listener("127.0.0.1", 0)
        self.port = self.listener.port
        self.servers = ApiServers(
            HttpConfig(api_servers=num),
            self.listener,
            drain_s=1.0,
            recovery_s=1.0,
            log_level="info",
            log=EventLog("test"),
            command=(sys.executable, "-S", "-c", program),
        )

    def start(self) -> "Rig":
        self.servers.start("ipc:///front", "")
        return self

    def look_until(self, is_done: Callable[[], bool]) -> None:
        """As the supervisor does, until something holds."""
        end = time.monotonic() + WAIT_S
        while not is_done():
            assert time.monotonic() < end
            next_s = min(self.servers.next_deadline or end, end)
            left_s = max(0.0, next_s - time.monotonic())
            ready = select.select(self.servers.fds, (), (), left_s)[0]
            self.servers.look(ready)

    def call(self) -> list[str]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S) as connection:
            return connection.makefile().read().split()


def kill(pid: int) -> None:
    """And wait until it is dead, though not buried."""
    end = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([end], (), (), WAIT_S)[0]
    os.close(end)


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    rigs: list[Rig] = []
    yield rigs
    for rig in rigs:
        rig.servers.end(timeout_s=5.0)


def test_each_is_told_its_number_and_where_the_engine_is(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(2).start())
    rig.look_until(lambda: rig.servers.are_up)

    answers = [rig.call() for _ in range(20)]
    assert {answer[0] for answer in answers} <= {"0", "1"}
    assert {answer[2] for answer in answers} == {"ipc:///front"}


def test_a_connection_made_before_any_server_is_up_is_answered(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(1))
    with socket.create_connection(("127.0.0.1", rig.port), timeout=WAIT_S) as early:
        rig.start()
        assert early.makefile().read().startswith("0 ")


def test_a_killed_one_comes_back_and_the_other_serves_on(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(2).start())
    rig.look_until(lambda: rig.servers.are_up)
    victim = rig.call()[1]
    kill(int(victim))

    assert all(rig.call()[1] != victim for _ in range(20))
    rig.look_until(lambda: int(victim) not in rig.servers.pids)
    rig.look_until(lambda: len(rig.servers.pids) == 2)
    assert victim not in map(str, rig.servers.pids)
    rig.look_until(lambda: len(rig.servers.fds) == 2)  # both are up: none has a line to say


@pytest.mark.slow
def test_one_that_dies_again_and_again_is_started_ever_more_rarely(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(1).start())
    rig.look_until(lambda: rig.servers.are_up)
    pauses = []
    for _ in range(3):
        died = time.monotonic()
        kill(rig.servers.pids[0])
        rig.look_until(lambda: not rig.servers.pids)
        assert rig.servers.next_deadline is not None
        pauses.append(rig.servers.next_deadline - died)
        rig.look_until(lambda: bool(rig.servers.pids))

    assert pauses[0] < pauses[1] < pauses[2]


def test_one_that_cannot_start_at_all_is_a_failed_start(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(1, "raise SystemExit(3)").start())
    with pytest.raises(StartFailed, match="API server 0 ended while it started: exit code 3"):
        rig.look_until(lambda: rig.servers.are_up)


def test_the_end_leaves_neither_processes_nor_the_port(rigs: list[Rig], no_leaks: None) -> None:
    rigs.append(rig := Rig(2).start())
    rig.look_until(lambda: rig.servers.are_up)
    rig.servers.end(timeout_s=WAIT_S)

    with pytest.raises(ConnectionRefusedError):
        rig.call()


def test_one_that_does_not_end_is_killed(rigs: list[Rig], no_leaks: None) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + ECHO
    rigs.append(rig := Rig(1, stubborn).start())
    rig.look_until(lambda: rig.servers.are_up)
    began = time.monotonic()
    rig.servers.end(timeout_s=0.2)

    assert time.monotonic() - began < WAIT_S
    assert rig.servers.pids == []


def test_each_is_replaced_by_a_new_process_one_after_the_other(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(2).start())
    rig.look_until(lambda: rig.servers.are_up)
    before = set(rig.servers.pids)
    rig.servers.replace()
    outcomes: list[str | None] = []

    def is_over() -> bool:
        assert len(rig.servers.pids) == 2
        outcomes.append(rig.servers.replaced())
        return "" in outcomes and len(rig.servers.fds) == 2  # the old ones have left

    rig.look_until(is_over)
    assert not before & set(rig.servers.pids)
    assert int(rig.call()[1]) in rig.servers.pids


def test_a_new_one_that_does_not_start_leaves_the_old_ones_in_place(
    rigs: list[Rig], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    rigs.append(rig := Rig(2, FAILS_ONCE_THERE_IS.format(path=str(broken)) + ECHO).start())
    rig.look_until(lambda: rig.servers.are_up)
    before = rig.servers.pids
    broken.touch()
    rig.servers.replace()
    outcomes: list[str | None] = []

    def is_over() -> bool:
        outcomes.append(rig.servers.replaced())
        return any(outcomes)

    rig.look_until(is_over)
    assert (
        outcomes[-1] == "the new API server 0 ended while it started: exit code 4; its log says why"
    )
    assert rig.servers.pids == before
    assert rig.call()[0] in ("0", "1")
