"""One `Status` out of what the scheduler, the groups and the front desk know."""

from collections.abc import Collection, Mapping

from cluster.engine_launch import EngineLaunch
from cluster.front_desk import FrontDesk
from cluster.groups import WorkerGroup
from cluster.lanes import Lane
from cluster.messages.reports import GroupStatus, Status, Totals
from scheduler.stats import GroupStats, SchedulerStats


def build_status(
    launch: EngineLaunch,
    *,
    is_stopping: bool,
    uptime_s: float,
    groups: Collection[WorkerGroup],
    drained_nodes: tuple[str, ...],
    lanes: Mapping[int, Lane],
    stats: SchedulerStats | None,
    desk: FrontDesk,
    num_dropped: int,
    num_turned_away: int,
    now: float,
) -> Status:
    """How everything is; `stats` is None until the first group is ready."""
    by_group = {} if stats is None else {each.group: each for each in stats.groups}
    return Status(
        engine_id=launch.instance,
        model=launch.model,
        state=_state(is_stopping, lanes, groups),
        uptime_s=uptime_s,
        num_clients=len(desk.clients),
        num_running=0 if stats is None else stats.running,
        num_waiting=0 if stats is None else stats.waiting,
        groups=tuple(
            _group_status(group, lanes.get(group.group), by_group.get(group.group), now)
            for group in groups
        ),
        drained_nodes=drained_nodes,
        totals=_totals(stats, desk, num_dropped, num_turned_away),
        num_engine_restarts=launch.num_restarts,
        last_engine_loss=launch.last_loss,
    )


def _state(is_stopping: bool, lanes: Mapping[int, Lane], groups: Collection[WorkerGroup]) -> str:
    if is_stopping:
        return "stopping"
    if lanes:
        return "serving"
    if not any(group.has_hope for group in groups):
        return "failed"
    return "recovering" if any(group.num_losses for group in groups) else "starting"


def _group_status(
    group: WorkerGroup, lane: Lane | None, stats: GroupStats | None, now: float
) -> GroupStatus:
    return GroupStatus(
        group=group.group,
        epoch=group.epoch,
        state=group.state,
        ranks=group.rank_statuses(),
        num_running=0 if stats is None else stats.running,
        num_blocks=0 if stats is None else stats.num_blocks,
        num_used_blocks=0 if stats is None else stats.num_blocks - stats.idle_blocks,
        num_cached_blocks=0 if stats is None else stats.cached_blocks,
        num_steps=0 if lane is None else lane.num_steps,
        steps_per_s=0.0 if lane is None else lane.steps_per_s(now),
        message=group.message,
        num_restarts=group.num_restarts,
    )


def _totals(
    stats: SchedulerStats | None, desk: FrontDesk, num_dropped: int, num_turned_away: int
) -> Totals:
    if stats is None:
        return Totals(
            num_dropped=num_dropped,
            num_turned_away=num_turned_away,
            num_cut_clients=desk.clients.num_cut,
        )
    return Totals(
        num_requests=stats.accepted,
        num_rejected=sum(stats.refused.values()),
        finished=stats.finished,
        prompt_tokens=desk.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        output_tokens=stats.output_tokens,
        prefill_tokens=stats.prefill_tokens,
        decode_tokens=stats.decode_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        num_steps=stats.steps,
        num_mixed_steps=stats.mixed_steps,
        num_preemptions=stats.preemptions,
        peak_used_blocks=max((group.peak_blocks for group in stats.groups), default=0),
        num_dropped=num_dropped,
        num_turned_away=num_turned_away,
        num_cut_clients=desk.clients.num_cut,
    )
