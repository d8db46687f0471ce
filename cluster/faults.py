"""Faults that were ordered for one process: what it suffers, when, until it has.

Only test clusters have any (`allow_chaos`); elsewhere nothing is ever ordered. Signals come from
the engine to ranks of its own host, whatever they are doing; a rank of another node is told to send
itself one. Those with a delay come from a thread, in the middle of whatever is computed then.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time

from cluster.logs import EventLog
from cluster.messages.faults import Fault


class InjectedFault(Exception):
    """An exception that was ordered."""


class Faults:
    """Of a worker."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._at_steps: list[Fault] = []
        self._num_lost_answers = self._num_missed_plans = self._num_late_answers = 0
        self._late_s = 0.0

    def take(self, fault: Fault) -> None:
        """Let it happen, now or when its step comes."""
        self._log.warning("fault", kind=fault.kind, step=fault.step, seconds=fault.seconds)
        match fault.kind:
            case "kill" | "stop" if not fault.step:
                signal_self(fault)
            case "kill" | "stop" | "raise" | "slow":
                self._at_steps.append(fault)
            case "drop":
                self._num_lost_answers += fault.count
            case "miss":
                self._num_missed_plans += fault.count
            case "delay":
                self._num_late_answers, self._late_s = fault.count, fault.seconds

    def begin(self, step: int) -> None:
        """A step begins.

        Raises:
            InjectedFault: one was ordered for it.
        """
        if not self._at_steps:
            return
        due = [fault for fault in self._at_steps if fault.step <= step]
        self._at_steps = [fault for fault in self._at_steps if fault.step > step]
        for fault in due:
            if fault.kind == "raise":
                raise InjectedFault(f"an exception was injected at step {step}")
            if fault.kind == "slow":
                self._slow_down(fault, step)
            else:
                signal_self(fault)

    def _slow_down(self, fault: Fault, step: int) -> None:
        if fault.count > 1:
            again = Fault(kind="slow", step=step + 1, seconds=fault.seconds, count=fault.count - 1)
            self._at_steps.append(again)
        time.sleep(fault.seconds)

    def misses_plan(self) -> bool:
        """Whether the plan that has come is to be taken for lost."""
        misses = self._num_missed_plans > 0
        self._num_missed_plans -= misses
        return misses

    def loses_answer(self) -> bool:
        """Whether the next answer is to be lost; it may be held up here."""
        if self._num_late_answers:
            self._num_late_answers -= 1
            time.sleep(self._late_s)
        loses = self._num_lost_answers > 0
        self._num_lost_answers -= loses
        return loses


def signal_self(fault: Fault) -> None:
    """Kill this process, or stop it for a while, after the fault's delay."""
    signal_process(fault, os.getpid())


def signal_process(fault: Fault, pid: int) -> None:
    """The same with any process of this host; one that is gone is no error."""
    send = _kill if fault.kind == "kill" else _stop
    if fault.after_s:
        timer = threading.Timer(fault.after_s, send, (pid, fault.seconds))
        timer.daemon = True
        timer.start()
    else:
        send(pid, fault.seconds)


def _kill(pid: int, _: float) -> None:
    _send(pid, signal.SIGKILL)


def _stop(pid: int, seconds: float) -> None:
    """Stop it at once; if it is this process, a shell lets it go on."""
    if pid == os.getpid():
        subprocess.Popen(
            ("sh", "-c", f"sleep {seconds:f}; kill -CONT {pid}"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    else:
        timer = threading.Timer(seconds, _send, (pid, signal.SIGCONT))
        timer.daemon = True
        timer.start()
    _send(pid, signal.SIGSTOP)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
