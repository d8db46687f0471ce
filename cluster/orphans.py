"""A child process that does not outlive its parent, however the parent ends (Linux)."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent(parent_pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Be sent a signal when the thread of the parent that started us ends.

    Call it first thing. A parent that was already gone ends us here.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise SystemExit(f"process {parent_pid}, which started this one, is gone")
