"""Who is next, and so who yields first: one key per sequence, fixed at its arrival."""

from scheduler.config import SchedulerConfig


def sort_key(
    config: SchedulerConfig, *, arrival: float, priority: int, serial: int
) -> tuple[float, int]:
    """Smaller goes first, in the queue and in a step; the largest is preempted first.

    First come, first served; ties by serial. Under the priority policy each level of
    priority is worth `priority_ageing_s` of waiting. All that wait age alike, so the order
    of any two never changes: ageing costs nothing, and a low one is passed only by those
    that came less than (levels x ageing) after it.
    """
    if config.policy == "priority":
        return (arrival + priority * config.priority_ageing_s, serial)
    return (arrival, serial)
