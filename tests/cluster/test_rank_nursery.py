"""Forked ranks: our children, with their own launch and output, however the nursery ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from cluster.errors import BackendError
from cluster.logs import EventLog
from cluster.rank_nursery import NAME, RankNursery
from cluster.rank_process import AdoptedProcess

COMMAND = (sys.executable, "-m", "tests.cluster.scripted_nursery")
SLEEPS = "import time; print('up', flush=True); time.sleep(600)"


class Rig:
    def __init__(self) -> None:
        self.nursery = RankNursery(
            EventLog("test"), load_timeout_s=30, fork_timeout_s=3, command=COMMAND
        )
        self._ranks: list[AdoptedProcess] = []

    def rank(self, program: str) -> AdoptedProcess:
        rank = self.nursery.fork()
        self._ranks.append(rank)
        assert rank.stdin is not None
        with rank.stdin as launch:
            launch.write(program.encode())
        return rank

    def process(self) -> psutil.Process:
        """The nursery itself."""
        (nursery,) = [it for it in psutil.Process().children() if it.name() == NAME]
        return nursery

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait(10)
            assert rank.stdout is not None
            rank.stdout.close()
        self.nursery.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()
    assert psutil.Process().children() == []


def said(rank: AdoptedProcess) -> bytes:
    assert rank.stdout is not None
    return rank.stdout.readline()


def test_a_rank_is_our_child_and_has_its_own_launch_and_output(rig: Rig) -> None:
    program = "import os; print('rank', {}, os.getppid(), os.getpgid(0) == os.getpid())"
    ranks = [rig.rank(program.format(number)) for number in range(3)]

    assert [said(rank) for rank in ranks] == [
        f"rank {number} {os.getpid()} True\n".encode() for number in range(3)
    ]
    assert [rank.wait(10) for rank in ranks] == [0, 0, 0]


def test_it_ends_with_its_exit_code_or_its_signal(rig: Rig) -> None:
    assert rig.rank("code = 7").wait(10) == 7
    raised = rig.rank("raise ValueError('no weights')")
    assert raised.wait(10) == 1
    assert raised.stdout is not None
    assert b"ValueError: no weights" in raised.stdout.read()

    killed, ended = rig.rank(SLEEPS), rig.rank(SLEEPS)
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(0.01)
    killed.kill()
    ended.terminate()
    assert (killed.wait(10), ended.wait(10)) == (-signal.SIGKILL, -signal.SIGTERM)
    killed.kill()  # of one that is gone is no error
    assert killed.wait(0) == -signal.SIGKILL


def test_ranks_outlive_a_nursery_and_the_next_rank_comes_from_another_one(rig: Rig) -> None:
    first = rig.rank(SLEEPS)
    assert said(first) == b"up\n"
    nursery = rig.process()
    nursery.kill()
    nursery.wait()

    second = rig.rank(SLEEPS)

    assert said(second) == b"up\n"
    assert rig.process().pid != nursery.pid
    assert psutil.Process(first.pid).is_running()


def test_a_nursery_that_hangs_is_told_of_and_replaced(rig: Rig) -> None:
    assert said(rig.rank(SLEEPS)) == b"up\n"
    rig.process().suspend()

    with pytest.raises(BackendError, match="the nursery has forked no rank: timed out"):
        rig.nursery.fork()

    assert said(rig.rank(SLEEPS)) == b"up\n"


def test_a_nursery_that_cannot_load_is_told_of(rig: Rig) -> None:
    broken = RankNursery(
        EventLog("test"), load_timeout_s=30, command=(sys.executable, "-c", "raise SystemExit(3)")
    )
    with pytest.raises(BackendError, match="it ended while it loaded the code of ranks"):
        broken.fork()


def test_after_an_upgrade_ranks_come_from_a_nursery_with_the_new_code(rig: Rig) -> None:
    rig.rank("code = 0").wait(10)
    before = rig.process().pid

    rig.nursery.forget_code()

    assert rig.rank("code = 0").wait(10) == 0
    assert rig.process().pid != before


def test_ranks_and_nursery_die_with_a_supervisor_that_is_killed() -> None:
    program = (
        "import time; from cluster.logs import EventLog;"
        "from cluster.rank_nursery import RankNursery;"
        f"n = RankNursery(EventLog('t'), load_timeout_s=30, command={COMMAND!r});"
        "r = n.fork(); r.stdin.write(b'from cluster.orphans import die_with_parent; import sys,"
        " time; die_with_parent(int(sys.argv[1])); print(1, flush=True); time.sleep(600)');"
        "r.stdin.close(); r.stdout.readline(); print(flush=True); time.sleep(600)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with supervisor:
        assert supervisor.stdout is not None
        supervisor.stdout.readline()
        family = psutil.Process(supervisor.pid).children(recursive=True)
        supervisor.kill()

    assert len(family) == 2
    assert psutil.wait_procs(family, timeout=10)[1] == []
