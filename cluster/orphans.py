"""A child process that does not outlive its parent, however the parent ends (Linux)."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # prctl(2)

ADOPTION_WAIT_S = 10.0


def die_with_parent(parent_pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Be sent a signal when the thread of the parent that started us ends.

    Call it first thing. A parent that was already gone ends us here.
    """
    _prctl(_PR_SET_PDEATHSIG, int(by))
    if os.getppid() != parent_pid:
        raise SystemExit(f"process {parent_pid}, which started this one, is gone")


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of children's children whose parent ends meanwhile, instead of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def wait_for_adoption(parent_pid: int) -> None:
    """Until the parent that has forked us has ended, and `parent_pid` is our parent."""
    deadline = time.monotonic() + ADOPTION_WAIT_S
    while os.getppid() != parent_pid and time.monotonic() < deadline:
        time.sleep(0.0005)


def name_process(name: str) -> None:
    """What ps and top call this process; at most 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def _prctl(option: int, argument: int | ctypes.c_char_p) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
