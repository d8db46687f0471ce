"""Faults that a client orders: for whom they are, and those that the engine itself suffers."""

import os
import socket
from collections.abc import Callable, Iterable

from cluster.faults import signal_process, signal_self
from cluster.groups import WorkerGroup
from cluster.logs import EventLog
from cluster.messages.faults import Fault, FaultInjected, InjectFault
from cluster.messages.sockets import FromEngine
from cluster.messages.workers import WorkerHello
from kvcache.cache import KVCache
from scheduler.scheduler import Scheduler

REFUSED = "this cluster does not let itself be broken: start it with allow_chaos (--allow-chaos)"


class ChaosDesk:
    """Passes faults on to ranks, and keeps the blocks that it has taken until their time is up."""

    def __init__(
        self, is_allowed: bool, send: Callable[[bytes, FromEngine], None], log: EventLog
    ) -> None:
        self._is_allowed = is_allowed
        self._send = send
        self._log = log
        self._host = socket.gethostname()
        self._withheld: list[tuple[float, KVCache]] = []
        """Until when, and whose."""

    def inject(
        self,
        asked: InjectFault,
        groups: Iterable[WorkerGroup],
        scheduler: Scheduler | None,
        now: float,
    ) -> FaultInjected:
        """Let it happen, or say why not."""
        if not self._is_allowed:
            return FaultInjected(refusal=REFUSED)
        fault = asked.fault
        self._log.warning(
            "fault_injected",
            kind=fault.kind,
            group=asked.group,
            rank=asked.rank,
            node=asked.node,
            step=fault.step,
            seconds=fault.seconds,
            count=fault.count,
        )
        if fault.kind == "full":
            return self._fill(asked.group, fault, scheduler, now)
        if asked.group < 0 and not asked.node:
            return self._suffer(fault)
        ranks = []
        for group in groups:
            if asked.group not in (-1, group.group):
                continue
            for number, rank in group.ranks.items():
                if asked.rank in (-1, number) and asked.node in ("", rank.hello.host):
                    group.was_hit = True
                    self._order(rank.peer, rank.hello, fault)
                    ranks.append((group.group, number))
        return FaultInjected(
            ranks=tuple(ranks), refusal="" if ranks else "no rank that is loaded is meant"
        )

    def _order(self, peer: bytes, hello: WorkerHello, fault: Fault) -> None:
        """A rank of this host need not listen to be hit."""
        is_signal = fault.kind in ("kill", "stop") and not fault.step
        if is_signal and hello.host == self._host and hello.pid != os.getpid():
            signal_process(fault, hello.pid)
        else:
            self._send(peer, fault)

    def _suffer(self, fault: Fault) -> FaultInjected:
        if fault.kind not in ("kill", "stop"):
            return FaultInjected(refusal=f"{fault.kind} is for ranks; name a group or a node")
        signal_self(fault)
        return FaultInjected()

    def _fill(
        self, group: int, fault: Fault, scheduler: Scheduler | None, now: float
    ) -> FaultInjected:
        if scheduler is None or group not in scheduler.groups:
            return FaultInjected(refusal=f"there is no group {group} that computes")
        cache = scheduler.groups[group].cache
        cache.withhold()
        self._withheld.append((now + fault.seconds, cache))
        return FaultInjected()

    @property
    def next_deadline(self) -> float | None:
        """When blocks go back."""
        return min((until for until, _ in self._withheld), default=None)

    def keep_time(self, now: float) -> None:
        """Give blocks back whose time is up; if their group is gone, nobody minds."""
        for until, cache in self._withheld:
            if now >= until:
                cache.restore()
        self._withheld = [kept for kept in self._withheld if kept[0] > now]
