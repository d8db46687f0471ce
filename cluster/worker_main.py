"""The main of a plain worker process: `python -m cluster.worker_main PARENT_PID < launch`."""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import msgspec

from cluster.backend import WorkerLaunch, decode_launch
from cluster.lease import Lease
from cluster.logs import EventLog, show_events
from cluster.orphans import die_with_parent, name_process
from cluster.start_phases import process_began
from cluster.worker_host import Runner, RunnerFactory, WorkerHost

M_MMAP_THRESHOLD = -3  # mallopt(3)

NAME = "stoker-rank"
"""As ps shows it."""

LARGE_BYTES = 1 << 20
"""From this size on memory comes from the system and goes back to it, which takes a millisecond
for some megabytes. More: what was needed once stays in the heap."""


def main(build: RunnerFactory | None = None) -> int:
    """Run one rank until its end; the exit code."""
    die_with_parent(int(sys.argv[1]))
    name_process(NAME)
    try:
        launch = decode_launch(sys.stdin.buffer.read())
    except msgspec.DecodeError as error:
        print(f"no launch on standard input: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _end)
    show_events(f"worker {launch.name}", launch.log_level)
    settle_on_cores(launch)
    log = EventLog("worker", group=launch.group, epoch=launch.epoch, rank=launch.rank)
    try:
        with Lease(launch, log) as lease:
            builds = build or build_model_runner
            return WorkerHost(launch, builds, log, began=process_began(), lease=lease).run()
    except SystemExit as ended:  # by a signal, when everything in order is done
        return int(ended.code or 0)


def build_model_runner(launch: WorkerLaunch) -> Runner:
    """Import torch only when the process is on its cores and knows its threads."""
    from cluster.model_runners import build_runner

    return build_runner(launch)


def settle_on_cores(launch: WorkerLaunch) -> None:
    """Pin this process to its cores, and settle it for as many threads."""
    if launch.cores:
        os.sched_setaffinity(0, launch.cores)
    settle_process(launch.runner.num_threads)


def settle_process(num_threads: int) -> None:
    """Say how many threads numerical libraries may start, and how they wait and allocate.

    Must come before torch is imported, which reads these settings then. OpenMP's threads spin
    by default for milliseconds, which stops everything where cores are shared; MKL rounds
    differently on differently aligned buffers unless it is told to be reproducible. The heap
    would keep what tensors leave behind, so large ones are pages of their own.
    """
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ["GOMP_SPINCOUNT"] = "5000"
    os.environ["MKL_CBWR"] = "AUTO,STRICT"
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def end_process(code: int) -> NoReturn:
    """End at once: taking torch apart in order takes a while and helps nobody."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
