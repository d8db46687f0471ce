"""Groups that come and go while the cluster serves; scripted workers on real sockets."""

from pathlib import Path

from cluster.group_instructions import Drain, Lose, Retire, Start
from cluster.groups import RestartPolicy, WorkerGroup
from cluster.messages.changes import Scaled, ScaleGroups
from cluster.messages.supervisor import GroupStopped, RetireGroup, StartGroup
from cluster.messages.workers import RankCapacity, WorkerHello
from cluster.scaling import ScaleLimits, Scaling, why_no_room
from scheduler.stats import GroupStats
from tests.cluster.cluster_rig import Rig, TestClient, group_of, wait_for_status
from tests.cluster.scripted import Script, tokens_after

HOST = "here"
GIB = 2**30


def scale(client: TestClient, num_groups: int | None) -> Scaled:
    client.send(ScaleGroups(num_groups))
    return client.next_of(Scaled)


def make_group(number: int, now: float = 0.0, **changes: object) -> WorkerGroup:
    policy = RestartPolicy(max_restarts=3)
    return WorkerGroup(number, 1, start_timeout_s=60.0, policy=policy, now=now)


def ready_group(
    number: int,
    *,
    epoch: int = 1,
    num_blocks: int = 10,
    block_bytes: int = 1,
    host: str = HOST,
    shared_bytes: int = 0,
) -> WorkerGroup:
    group = make_group(number)
    capacity = RankCapacity(
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        vocab_size=9,
        max_model_len=64,
        weight_bytes=GIB,
        shared_bytes=shared_bytes,
        device="cpu",
    )
    hello = WorkerHello(
        protocol=1,
        engine_id="e",
        key="k",
        group=number,
        epoch=epoch,
        rank=0,
        capacity=capacity,
        host=host,
    )
    group.hello(b"w", hello, now=0.0)
    group.ready(b"w", now=0.0)
    assert group.state == "ready"
    return group


def make_scaling(groups: dict[int, WorkerGroup], **limits: object) -> Scaling:
    fields: dict[str, object] = {"num_groups": len(groups), "drain_s": 30.0, **limits}
    return Scaling(
        ScaleLimits(**fields),  # type: ignore[arg-type]  # a test's own words
        groups,
        make_group,
        lambda num_more: "",
    )


def test_streams_are_whole_while_groups_come_and_go_under_load(tmp_path: Path) -> None:
    with Rig(tmp_path, drain_s=60.0) as rig:
        supervisor = rig.supervisor()
        rig.start_worker(Script(step_s=0.002))
        client, boss = rig.client(), rig.client()
        first = [client.submit(max_tokens=120) for _ in range(8)]

        assert scale(boss, 2).num_groups == 2
        assert supervisor.next_of(StartGroup) == StartGroup(1, 1)
        rig.start_worker(Script(step_s=0.002), group=1)
        wait_for_status(boss, lambda status: group_of(status, 1).state == "ready")
        second = [client.submit(max_tokens=120) for _ in range(6)]
        client.read_until(lambda: client.tokens.keys() >= {*second})
        assert group_of(boss.status(), 1).num_running > 0

        assert scale(boss, 1).num_groups == 1
        third = [client.submit(max_tokens=20) for _ in range(4)]
        client.finish(*first, *second, *third)
        assert supervisor.next_of(RetireGroup) == RetireGroup(1, 1)
        supervisor.send(GroupStopped(1, 1))
        left = wait_for_status(boss, lambda status: group_of(status, 1).state == "retired")

    for handles, count in ((first, 120), (second, 120), (third, 20)):
        assert [client.tokens[handle] for handle in handles] == [tokens_after(4, count)] * len(
            handles
        )
    assert group_of(left, 1).ranks == ()
    assert left.totals.recomputed_tokens == 0
    assert rig.exit_codes["1.1.0"] == 0


def test_what_does_not_end_in_time_goes_on_in_another_group(tmp_path: Path) -> None:
    with Rig(tmp_path, num_groups=2, drain_s=0.0) as rig:
        for group in (0, 1):
            rig.start_worker(Script(step_s=0.002), group=group)
        client, boss = rig.client(), rig.client()
        wait_for_status(boss, lambda status: all(g.state == "ready" for g in status.groups))
        handles = [client.submit(max_tokens=100) for _ in range(8)]
        client.read_until(lambda: client.tokens.keys() >= {*handles})
        scale(boss, 1)
        client.finish(*handles)
        totals = boss.status().totals

    assert all(client.tokens[handle] == tokens_after(4, 100) for handle in handles)
    assert totals.recomputed_tokens > 0


def test_a_group_that_left_comes_back_under_its_number_and_a_new_epoch(tmp_path: Path) -> None:
    with Rig(tmp_path, num_groups=2) as rig:
        supervisor = rig.supervisor()
        for group in (0, 1):
            rig.start_worker(group=group)
        client = rig.client()
        wait_for_status(client, lambda status: all(g.state == "ready" for g in status.groups))
        scale(client, 1)
        gone = supervisor.next_of(RetireGroup)
        supervisor.send(GroupStopped(gone.group, gone.epoch))
        wait_for_status(client, lambda status: group_of(status, 1).state == "retired")
        scale(client, 2)
        assert supervisor.next_of(StartGroup) == StartGroup(1, 2)
        rig.start_worker(group=1, epoch=2)
        wait_for_status(client, lambda status: group_of(status, 1).state == "ready")


def test_more_than_memory_was_dealt_out_to_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with Rig(tmp_path, max_groups=2) as rig:
        rig.start_worker()
        client = rig.client()
        answer = scale(client, 3)
        none = scale(client, 0)
        automatic = scale(client, None)

    assert "num_groups=3 is above the 2" in answer.refusal
    assert "max_groups=3" in answer.refusal
    assert answer.num_groups == 1
    assert "at least 1 group" in none.refusal
    assert "min_groups and max_groups" in automatic.refusal


def test_no_number_makes_the_engine_count_for_ever() -> None:
    scaling = make_scaling({0: ready_group(0)})

    assert "at most 1024 groups" in scaling.why_not(2**63)
    assert "at most 1024 groups" in scaling.why_not(1025)
    assert scaling.why_not(1024) == ""


def test_the_groups_that_do_not_serve_yet_go_first_then_the_highest_numbers() -> None:
    groups = {0: make_group(0), 1: ready_group(1), 2: ready_group(2)}
    scaling = make_scaling(groups)

    assert scaling.change(2, now=1.0) == [Retire(0, 1)]
    assert scaling.change(1, now=2.0) == [Drain(2)]


def test_a_group_that_is_about_to_leave_stays_if_it_is_needed_again() -> None:
    groups = {0: ready_group(0), 1: ready_group(1)}
    scaling = make_scaling(groups)
    scaling.change(1, now=1.0)

    assert scaling.change(3, now=2.0) == [Drain(1, drains=False), Start(2, 1)]
    assert groups[1].state == "ready"
    assert groups[1].next_deadline is None


def test_a_draining_group_that_is_lost_does_not_start_again() -> None:
    group = ready_group(0)
    group.drain(30.0, now=1.0)
    (lost,) = group.failed(1, 0, "it broke", now=2.0)

    assert isinstance(lost, Lose)
    assert (lost.retires, lost.restarts) == (True, False)
    assert group.stopped(1, now=3.0) == []
    assert group.state == "retired"


def test_a_draining_group_has_its_time_and_no_more() -> None:
    group = ready_group(0)
    group.drain(30.0, now=1.0)

    assert group.tick(30.9) == []
    assert group.tick(31.0) == [Retire(0, 1)]


def stats_of(number: int, num_blocks: int, peak_blocks: int) -> GroupStats:
    return GroupStats(
        group=number,
        epoch=1,
        step=1,
        unanswered=0,
        running=0,
        num_blocks=num_blocks,
        idle_blocks=num_blocks,
        cached_blocks=0,
        peak_blocks=peak_blocks,
    )


def test_what_present_pools_may_still_grow_by_is_not_free() -> None:
    group = ready_group(0, num_blocks=4, block_bytes=GIB)
    stats = [stats_of(0, num_blocks=4, peak_blocks=1)]

    refusal = why_no_room(1, [group], stats, HOST, 8 * GIB)

    assert "1 more groups need 5.17 GiB" in refusal
    assert "5.00 GiB are left of 8.00 free ones" in refusal
    assert why_no_room(1, [group], stats, HOST, 9 * GIB) == ""
    assert why_no_room(1, [group], stats, "elsewhere", 1) == ""


def test_weights_that_groups_share_are_no_part_of_what_another_group_needs() -> None:
    group = ready_group(0, num_blocks=1000, block_bytes=4 * 2**20, shared_bytes=GIB)
    stats = [stats_of(0, num_blocks=1000, peak_blocks=1000)]

    assert "1 more groups need 4.07 GiB" in why_no_room(1, [group], stats, HOST, 4 * GIB)
