"""Plain worker processes: started with their launch, watched, and never left behind."""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from cluster.backend import RankExit, decode_launch
from cluster.errors import BackendError
from cluster.local_backend import LocalBackend
from cluster.logs import EventLog
from tests.cluster.launches import make_launch, make_spec

SLEEPS = "import sys, time; sys.stdin.read(); print('up', flush=True); time.sleep(600)"


class Rig:
    """A backend whose workers run a line of Python instead of a model."""

    def __init__(self) -> None:
        self.exits: queue.Queue[RankExit] = queue.Queue()
        self.backends: list[LocalBackend] = []

    def backend(self, program: str) -> LocalBackend:
        backend = LocalBackend(
            self.exits.put,
            num_ranks=2,
            cores=(0, 1),
            log=EventLog("test"),
            command=(sys.executable, "-c", program),
        )
        self.backends.append(backend)
        return backend

    def next_exit(self) -> RankExit:
        return self.exits.get(timeout=20)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for backend in rig.backends:
        backend.close(timeout_s=0.0)
    assert psutil.Process().children() == []


def test_a_worker_reads_its_launch_from_standard_input(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "launch"
    backend = rig.backend(f"import sys; open({str(path)!r}, 'wb').write(sys.stdin.buffer.read())")
    launch = make_launch(rank=1, num_ranks=2)

    backend.start([launch], timeout_s=5)

    assert rig.next_exit().message.endswith("exited with code 0")
    assert decode_launch(path.read_bytes()) == launch


def test_a_worker_that_fails_is_reported_with_its_last_words(rig: Rig) -> None:
    rig.backend("raise SystemExit('no weights here')").start(
        [make_launch(group=3, epoch=2, rank=1)], timeout_s=5
    )

    gone = rig.next_exit()

    assert (gone.group, gone.epoch, gone.rank, gone.was_asked) == (3, 2, 1, False)
    assert "exited with code 1; it last wrote:\nno weights here" in gone.message


def test_a_killed_worker_is_reported_with_the_signal_and_without_its_log(rig: Rig) -> None:
    event = "print('01:44:50.403 INFO    worker 0.1.0 worker_ready rank=0', flush=True)"
    rig.backend(f"import os; {event}; os.kill(os.getpid(), 9)").start([make_launch()], timeout_s=5)

    gone = rig.next_exit()
    assert gone.message.endswith("was ended by SIGKILL")
    assert gone.reason == "died"


def test_a_worker_that_somebody_else_ends_in_order_is_told_from_one_that_died(rig: Rig) -> None:
    rig.backend("import os; os.kill(os.getpid(), 15)").start([make_launch()], timeout_s=5)

    assert rig.next_exit().reason == "ended"


def test_stop_ends_the_ranks_of_one_group_only(rig: Rig) -> None:
    backend = rig.backend(SLEEPS)
    backend.start([make_launch(group=0, rank=r, num_ranks=2) for r in range(2)], timeout_s=5)
    backend.start([make_launch(group=1)], timeout_s=5)

    backend.stop(0, 1, timeout_s=20)

    gone = [rig.next_exit() for _ in range(2)]
    assert {(g.group, g.rank, g.was_asked) for g in gone} == {(0, 0, True), (0, 1, True)}
    assert len(psutil.Process().children()) == 1


def test_a_worker_that_ignores_the_request_is_killed(rig: Rig, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    backend = rig.backend(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open({str(ready)!r}, 'w').close(); time.sleep(600)"
    )
    backend.start([make_launch()], timeout_s=5)
    ready.read_text()  # returns when the worker has closed the other end

    backend.stop(0, 1, timeout_s=0.1)

    assert "was ended by SIGKILL" in rig.next_exit().message


def test_stopping_what_is_not_there_is_no_error(rig: Rig) -> None:
    backend = rig.backend(SLEEPS)
    backend.stop(7, 7, timeout_s=1)
    backend.close(timeout_s=1)
    backend.close(timeout_s=1)


def test_a_program_that_is_missing_is_a_backend_error(rig: Rig) -> None:
    backend = LocalBackend(
        rig.exits.put, num_ranks=1, cores=(), log=EventLog("test"), command=("/no/such/program",)
    )
    with pytest.raises(BackendError, match=r"cannot start worker 0\.1\.0 as /no/such/program"):
        backend.start([make_launch()], timeout_s=5)


def test_two_ranks_on_two_cores_have_one_each(rig: Rig) -> None:
    places = rig.backend(SLEEPS).place(0, 1, 1, 2, timeout_s=1)

    assert [place.cores for place in places] == [(0,), (1,)]
    assert [place.rank for place in places] == [0, 1]
    assert len({place.node for place in places}) == 1


def test_a_worker_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    worker = (
        "import os, sys, time; from cluster.orphans import die_with_parent;"
        "die_with_parent(int(sys.argv[1]));"
        f"open({str(fifo)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    supervisor = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from cluster.local_backend import LocalBackend;"
            "from cluster.logs import EventLog; from tests.cluster.launches import make_launch;"
            "b = LocalBackend(print, num_ranks=1, cores=(), log=EventLog('t'),"
            f" command=(sys.executable, '-c', {worker!r}));"
            "b.start([make_launch()], timeout_s=5); time.sleep(600)",
        ]
    )
    try:
        process = psutil.Process(int(fifo.read_text()))
    finally:
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()
    assert process.wait(timeout=10) is None or not process.is_running()


def test_gpu_ranks_meet_at_a_port_that_rank_0_inherits_listening(rig: Rig, tmp_path: Path) -> None:
    program = (
        "import json, socket, sys; launch = json.load(sys.stdin); meet = launch['rendezvous'];\n"
        "if launch['rank'] == 0:\n"
        "    own = socket.socket(fileno=meet['listener_fd'])\n"
        "    assert own.getsockname()[1] == meet['store_port']; own.accept()\n"
        "else:\n"
        "    socket.create_connection((meet['store_host'], meet['store_port']))\n"
    )
    spec = replace(make_spec(), device="cuda")

    rig.backend(program).start(
        [make_launch(rank=rank, num_ranks=2, spec=spec) for rank in range(2)], timeout_s=5
    )

    assert [rig.next_exit().message.endswith("exited with code 0") for _ in range(2)] == [True] * 2
