"""What a cluster shows of a fault: when it was noticed, and when all was whole again.

A thread asks for the status every few milliseconds and keeps what has changed. A fault counts as
noticed when the engine says of a group that was hit that it is not ready, or is in another epoch;
and one of the engine itself when it is gone, or another one. Whole means that every group is
ready.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.messages.reports import Status
from stoker.chaos.link import ChaosLink
from stoker.chaos.orders import Shape

LOOK_S = 0.01
"""Between two looks. More: what was noticed when is known less exactly."""

WAIT_S = 0.05
"""Between two looks at what the watch knows."""


@dataclass(frozen=True, slots=True)
class Moment:
    """How a cluster is from some time on, until the next one."""

    at: float
    """Monotonic"""
    engine_id: str = ""
    """Empty: no engine answers"""
    groups: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Epoch and state of each group that is wanted"""
    message: str = ""
    """Why a group was lost last, of those that are not ready"""

    @property
    def is_whole(self) -> bool:
        return bool(self.groups) and all(state == "ready" for _, state in self.groups.values())

    @property
    def ready(self) -> list[int]:
        return [group for group, (_, state) in self.groups.items() if state == "ready"]


def moment_of(at: float, status: Status | None) -> Moment:
    """What matters of a status; None: no engine has answered."""
    if status is None:
        return Moment(at)
    wanted = [group for group in status.groups if group.state not in ("retiring", "retired")]
    messages = [group.message for group in wanted if group.state != "ready" and group.message]
    return Moment(
        at,
        status.engine_id,
        {group.group: (group.epoch, group.state) for group in wanted},
        messages[0] if messages else "",
    )


def shape_of(status: Status) -> Shape:
    """Of a cluster whose groups are ready."""
    groups = [group for group in status.groups if group.ranks]
    hosts = {rank.host for group in groups for rank in group.ranks}
    return Shape(tuple(group.group for group in groups), len(groups[0].ranks), tuple(sorted(hosts)))


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a fault; seconds are since it was ordered."""

    noticed_s: float | None = None
    """None: the cluster bore it and lost nothing."""
    whole_s: float | None = None
    """None: nothing was lost, or it is not whole again."""
    message: str = ""
    """The engine's words for it"""


class ClusterWatch:
    """Looks at one cluster from entering on until leaving."""

    def __init__(self, address: str, *, key_file: str | None = None) -> None:
        self._link = ChaosLink(address, key_file=key_file)
        self._moments: list[Moment] = []
        self._shape = Shape((0,), 1, ("",))
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-watch")

    def _run(self) -> None:
        with self._link as link:
            while not self._has_ended.is_set():
                status = link.look()
                moment = moment_of(time.monotonic(), status)
                if status is not None and moment.is_whole:
                    self._shape = shape_of(status)
                if not self._moments or not _is_same(self._moments[-1], moment):
                    self._moments.append(moment)
                time.sleep(LOOK_S)

    @property
    def now(self) -> Moment:
        return self._moments[-1] if self._moments else Moment(time.monotonic())

    @property
    def shape(self) -> Shape:
        """What there is to be hit, as it was when all was whole last."""
        return self._shape

    def whole_spans(self, begin: float, end: float) -> list[tuple[float, float]]:
        """From when to when every group was ready, within these times."""
        moments = list(self._moments)
        ends = [*(moment.at for moment in moments[1:]), end]
        return [
            (max(begin, moment.at), min(end, until))
            for moment, until in zip(moments, ends, strict=True)
            if moment.is_whole and moment.at < end and until > begin
        ]

    def losses(self, begin: float, end: float) -> list[float]:
        """When a group or the engine was seen to be lost, within these times."""
        moments = list(self._moments)
        return [
            after.at
            for before, after in pairwise(moments)
            if begin <= after.at < end and len(after.ready) < len(before.ready)
        ]

    def wait_whole(self, timeout_s: float) -> bool:
        """Wait until every group is ready; whether that was so in time."""
        return self._wait(lambda: self.now.is_whole, timeout_s)

    def wait_served(self, timeout_s: float) -> bool:
        """Wait until some group is ready; whether that was so in time."""
        return self._wait(lambda: bool(self.now.ready), timeout_s)

    def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() >= deadline:
                return False
            time.sleep(WAIT_S)
        return True

    def fate(self, at: float, groups: frozenset[int], *, hits_engine: bool, until: float) -> Fate:
        """What has become, by now, of a fault that was ordered at `at`.

        Args:
            until: what shows later is another fault's.
        """
        return fate_in(list(self._moments), at, groups, hits_engine=hits_engine, until=until)

    def __enter__(self) -> "ClusterWatch":
        self._thread.start()
        self._wait(lambda: bool(self._moments), 30.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()


def fate_in(
    moments: list[Moment],
    at: float,
    groups: frozenset[int],
    *,
    hits_engine: bool,
    until: float = float("inf"),
) -> Fate:
    """The same, of a history in the order of time."""
    before = next((moment for moment in reversed(moments) if moment.at <= at), moments[0])
    noticed: Moment | None = None
    for moment in moments:
        if moment.at <= at:
            continue
        is_shown = moment.at <= until and _shows(before, moment, groups, hits_engine)
        if noticed is None and is_shown:
            noticed = moment
        if noticed is not None and moment.is_whole:
            return Fate(noticed.at - at, moment.at - at, noticed.message)
    return Fate() if noticed is None else Fate(noticed.at - at, None, noticed.message)


def _shows(before: Moment, now: Moment, groups: frozenset[int], hits_engine: bool) -> bool:
    if hits_engine:
        return now.engine_id != before.engine_id
    if not now.engine_id:
        return False
    return any(
        group in now.groups and now.groups[group] != before.groups.get(group) for group in groups
    )


def _is_same(one: Moment, other: Moment) -> bool:
    return (one.engine_id, one.groups) == (other.engine_id, other.groups)
