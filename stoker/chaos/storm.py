"""Fault after fault, and what became of each."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from cluster.errors import ClusterLost
from scheduler.errors import InvalidRequest
from stoker.chaos.link import ChaosLink
from stoker.chaos.orders import Order
from stoker.chaos.watch import ClusterWatch, Fate

LOOK_S = 0.02
"""Between two looks at what became of the faults."""


class FaultReport(Struct, kw_only=True, omit_defaults=True):
    """One fault and what became of it; seconds are since it was ordered."""

    what: str
    where: str
    is_hang: bool = False
    noticed_s: float | None = None
    """None: nothing was lost."""
    whole_s: float | None = None
    """None: nothing was lost, or it is not whole again."""
    message: str = ""
    """The engine's words for it"""

    @property
    def is_broken(self) -> bool:
        """Whether the cluster has not come back from it."""
        return self.noticed_s is not None and self.whole_s is None

    def sentence(self) -> str:
        """For a terminal."""
        if self.noticed_s is None:
            return f"{self.what}, {self.where}: nothing was lost"
        whole = "not whole again" if self.whole_s is None else f"whole after {self.whole_s:.2f} s"
        why = f": {self.message.splitlines()[0]}" if self.message else ""
        return f"{self.what}, {self.where}: noticed after {self.noticed_s:.3f} s, {whole}{why}"


@dataclass(frozen=True, slots=True)
class _Open:
    """A fault that was ordered, of which the end is not known."""

    order: Order
    at: float
    groups: frozenset[int]

    @property
    def lasts_s(self) -> float:
        fault = self.order.asked.fault
        return fault.after_s + (0.0 if self.order.is_hang else fault.seconds * fault.count)


class Storm:
    """Orders faults of one cluster, and reports each when its end is known."""

    def __init__(
        self,
        link: ChaosLink,
        watch: ClusterWatch,
        report: Callable[[FaultReport], None],
        *,
        watch_s: float,
        mend_s: float,
    ) -> None:
        """
        Args:
            watch_s: so long after its end a fault may still be noticed.
            mend_s: the cluster has so long to be whole again.
        """
        self._link = link
        self._watch = watch
        self._report = report
        self._watch_s = watch_s
        self._mend_s = mend_s
        self._open: list[_Open] = []

    def let_happen(self, order: Order) -> None:
        """Order a fault.

        Raises:
            InvalidRequest: the cluster does not allow it, or nobody is meant.
        """
        at = time.monotonic()
        told = self._link.inject(order.asked)
        ranks = () if told is None else told.ranks
        groups = frozenset(group for group, _ in ranks) or frozenset({order.asked.group})
        self._open.append(_Open(order, at, groups))

    def try_to_let_happen(self, order: Order) -> bool:
        """The same, but for who has just died of another fault; whether it was ordered."""
        try:
            self.let_happen(order)
        except InvalidRequest:
            return False
        return True

    def pause(self, seconds: float) -> None:
        """Do nothing for so long, but look what has become of the faults."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._look()
            time.sleep(min(LOOK_S, left))

    def wait_whole(self) -> None:
        """Wait until every group is ready.

        Raises:
            ClusterLost: it takes too long.
        """
        self._wait(lambda: self._watch.now.is_whole, "not every group is ready")

    def wait_served(self) -> None:
        """Wait until some group is ready.

        Raises:
            ClusterLost: it takes too long.
        """
        self._wait(lambda: bool(self._watch.now.ready), "no group is ready")

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._mend_s
        while not is_so():
            self._look()
            if time.monotonic() >= deadline:
                raise ClusterLost(f"{what} after {self._mend_s:g} s: {self._watch.now.groups}")
            time.sleep(LOOK_S)

    def settle(self) -> None:
        """Wait until the end of every fault is known, or its time is over."""
        while self._open:
            self._look()
            time.sleep(LOOK_S)

    def _look(self) -> None:
        now = time.monotonic()
        for one in list(self._open):
            fate = self._watch.fate(
                one.at, one.groups, hits_engine=one.order.hits_engine, until=self._until(one)
            )
            age_s = now - one.at
            if fate.noticed_s is None:
                is_over = age_s > one.lasts_s + self._watch_s
            else:
                is_over = fate.whole_s is not None or age_s > self._mend_s
            if is_over:
                self._open.remove(one)
                self._report(_report_of(one.order, fate))

    def _until(self, one: _Open) -> float:
        """When what shows may be the doing of the next fault, if this one may show nothing."""
        fault = one.order.asked.fault
        if one.order.is_hang or fault.kind not in ("stop", "slow", "delay", "full"):
            return float("inf")
        later = [
            other.at
            for other in self._open
            if other.at > one.at and (other.order.hits_engine or other.groups & one.groups)
        ]
        return min(later, default=float("inf"))


def _report_of(order: Order, fate: Fate) -> FaultReport:
    return FaultReport(
        what=order.name,
        where=where_of(order),
        is_hang=order.is_hang,
        noticed_s=fate.noticed_s,
        whole_s=fate.whole_s,
        message=fate.message,
    )


def where_of(order: Order) -> str:
    """In words."""
    asked = order.asked
    if asked.node:
        return f"node {asked.node}"
    if asked.group < 0:
        return "the engine"
    return f"group {asked.group}" if asked.rank < 0 else f"rank {asked.rank} of group {asked.group}"
