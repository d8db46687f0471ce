"""Where the time of a start went, as phases that follow one another and so add up to it.

Parts of a start run side by side. These phases follow what was waited for: the supervisor, the
backend, and of the group that was ready last the rank that was loaded last.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

RANK_PHASES = ("import", "load", "map", "profile")
"""What a rank measures of itself, one after the other; said in its hello."""

PHASES = ("plan", "backend", "place", *RANK_PHASES, "allocate", "serve")
"""`plan`: from the start of the supervisor's process until it has started the parts; `backend`:
until Ray, if it is used, is up; `place`: until the ranks' processes are started, forked ones with
their code; `import`: until a rank has loaded its code; `load`: the weights, or `map`, if its host
has kept them; `profile`: the largest step; `allocate`: until all ranks have their K/V; `serve`:
until requests are taken on every way."""


class StartClock:
    """Of one cluster's first start. Times are of one monotonic clock."""

    def __init__(self, began: float) -> None:
        """`began`: when the supervisor's process did."""
        self._began = began
        self._launched = self._backend_open = began
        self._placed: dict[int, float] = {}
        self._last_group: tuple[int, Mapping[str, float], float] | None = None

    def parts_launched(self, now: float) -> None:
        """The engine and the backend are being started."""
        self._launched = self._backend_open = now

    def backend_opened(self, now: float) -> None:
        self._backend_open = now

    def group_placed(self, group: int, now: float) -> None:
        """The processes of its ranks are started."""
        self._placed[group] = now

    def group_ready(self, group: int, rank_s: Mapping[str, float], now: float) -> None:
        """`rank_s`: seconds of `RANK_PHASES`, of the rank that the group waited for."""
        self._last_group = group, rank_s, now

    def phases(self, now: float) -> dict[str, float]:
        """Seconds of each of `PHASES`, when everything is ready; together those since `began`."""
        assert self._last_group is not None, "no group is ready"
        group, rank_s, group_ready = self._last_group
        placed = self._placed.get(group, self._backend_open)
        ends = [self._launched, self._backend_open, placed]
        for name in RANK_PHASES:
            ends.append(ends[-1] + max(0.0, rank_s.get(name, 0.0)))
        found = {}
        last = self._began
        for name, end in zip(PHASES, [*ends, group_ready, now], strict=True):
            end = min(max(end, last), group_ready if name != "serve" else now)
            found[name], last = end - last, end
        return found


def process_began(stat: Path = Path("/proc/self/stat")) -> float:
    """When this process was started, on the monotonic clock; now, where the system has no /proc."""
    now = time.monotonic()
    try:
        after_name = stat.read_text().rpartition(")")[2].split()
        since_boot_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # proc_pid_stat(5), field 22
        return now - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
    except (OSError, AttributeError):
        return now
