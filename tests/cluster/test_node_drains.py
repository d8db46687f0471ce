"""Nodes out of service: what runs there goes on elsewhere at once, whatever is left to compute."""

from pathlib import Path

import pytest

from cluster.group_instructions import Instruction, Retire, Start
from cluster.groups import RestartPolicy, WorkerGroup
from cluster.messages.changes import DrainNode, NodeDrained
from cluster.messages.supervisor import AvoidNodes, GroupStopped, RetireGroup, StartGroup
from cluster.messages.workers import NodeFacts, RankCapacity, WorkerGreeting, WorkerHello
from cluster.node_drains import RETRY_S, NodeDrains
from cluster.scaling import ScaleLimits, Scaling
from tests.cluster.cluster_rig import Rig, TestClient, group_of, wait_for_status
from tests.cluster.scripted import Script, tokens_after

FIRST, SECOND = "10.0.0.1 (one)", "10.0.0.2 (two)"


def drain(client: TestClient, node: str, *, undo: bool = False) -> NodeDrained:
    client.send(DrainNode(node, undo))
    return client.next_of(NodeDrained)


def make_group(number: int, now: float = 0.0) -> WorkerGroup:
    policy = RestartPolicy(max_restarts=3)
    return WorkerGroup(number, 1, start_timeout_s=60.0, policy=policy, now=now)


def bring_up(group: WorkerGroup, node: str) -> None:
    peer, number, epoch = b"w", group.group, group.epoch
    facts = NodeFacts(node=node)
    group.greet(
        peer,
        WorkerGreeting(
            protocol=1, engine_id="e", key="k", group=number, epoch=epoch, rank=0, facts=facts
        ),
        "",
        now=0.0,
    )
    capacity = RankCapacity(num_blocks=10, block_bytes=1, vocab_size=9, max_model_len=64)
    hello = WorkerHello(
        protocol=1,
        engine_id="e",
        key="k",
        group=number,
        epoch=epoch,
        rank=0,
        capacity=capacity,
        host=node.split("(")[1].strip(")"),
    )
    group.hello(peer, hello, now=0.0)
    group.ready(peer, now=0.0)
    assert group.state == "ready"


def make_drains(*nodes: str) -> tuple[NodeDrains, dict[int, WorkerGroup]]:
    """A ready group on each of these nodes."""
    groups = {number: make_group(number) for number in range(len(nodes))}
    for number, node in enumerate(nodes):
        bring_up(groups[number], node)
    drained: set[str] = set()
    scaling = Scaling(
        ScaleLimits(num_groups=len(nodes)), groups, make_group, lambda num_more: "", drained
    )
    return NodeDrains(groups, scaling, drained), groups


@pytest.mark.parametrize("name", ["10.0.0.2", "two"])
def test_a_group_leaves_at_once_and_starts_elsewhere(name: str) -> None:
    drains, groups = make_drains(FIRST, SECOND)

    assert drains.drain(name, now=1.0) == [Retire(1, 1), Start(2, 1)]
    assert drains.num_leaving(name) == 1
    groups[1].stopped(1, now=2.0)
    assert drains.num_leaving(name) == 0
    assert drains.keep_time(now=3.0) == []
    assert drains.next_deadline is None


def test_the_last_groups_stay_until_another_serves_on_another_node() -> None:
    drains, groups = make_drains(FIRST)

    assert drains.drain("one", now=1.0) == [Start(1, 1)]
    assert "has to serve on another node" in drains.waits_for("one")
    assert drains.keep_time(now=2.0) == []
    bring_up(groups[1], SECOND)
    assert drains.keep_time(now=3.0) == [Retire(0, 1)]
    assert drains.waits_for("one") == ""


def test_a_start_elsewhere_that_fails_is_tried_again_after_a_while_and_costs_nobody() -> None:
    drains, groups = make_drains(FIRST)
    drains.drain("one", now=1.0)
    groups[1].failed(1, -1, "no room", now=2.0)
    groups[1].stopped(1, now=2.0)

    assert drains.keep_time(now=3.0) == []
    assert drains.waits_for("one").endswith("no room")
    assert drains.next_deadline == 1.0 + RETRY_S
    assert drains.keep_time(now=1.0 + RETRY_S) == [Start(1, 2)]
    assert groups[0].state == "ready"


def test_a_group_that_comes_up_on_a_drained_node_leaves_again() -> None:
    drains, groups = make_drains(FIRST, SECOND)
    drains.drain("two", now=1.0)
    bring_up(groups[2], SECOND)

    assert drains.keep_time(now=2.0) == [Retire(2, 1), Start(3, 1)]


def test_what_leaves_slowly_since_fewer_are_wanted_leaves_a_drained_node_at_once() -> None:
    drains, groups = make_drains(FIRST, SECOND)
    groups[1].drain(600.0, now=0.0)

    assert drains.drain("two", now=1.0)[0] == Retire(1, 1)


def test_undone_the_node_takes_groups_that_could_start_nowhere_else() -> None:
    drains, groups = make_drains(FIRST, SECOND)
    drains.drain("two", now=1.0)
    groups[1].stopped(1, now=1.5)
    groups[2].failed(1, -1, "no room", now=2.0)
    groups[2].stopped(1, now=2.0)

    assert drains.undo("two", now=3.0) == [Start(1, 2)]
    assert drains.nodes == ()
    bring_up(groups[1], SECOND)
    assert drains.keep_time(now=4.0) == []


def test_draining_both_nodes_keeps_the_groups_that_have_nowhere_to_go() -> None:
    drains, groups = make_drains(FIRST, SECOND)
    drains.drain("one", now=1.0)
    given: list[Instruction] = drains.drain("two", now=2.0)

    assert Retire(1, 1) not in given
    assert groups[1].state == "ready"


def test_streams_are_whole_and_go_on_at_once_when_their_node_is_drained(tmp_path: Path) -> None:
    """The answers would take minutes where they are."""
    with Rig(tmp_path, num_groups=2, drain_s=600.0) as rig:
        supervisor = rig.supervisor()
        slow = Script(step_s=0.05)
        rig.start_worker(Script(step_s=0.002), node=FIRST)
        rig.start_worker(slow, group=1, node=SECOND)
        client, boss = rig.client(), rig.client()
        wait_for_status(boss, lambda status: all(g.state == "ready" for g in status.groups))
        handles = [client.submit(max_tokens=120) for _ in range(8)]
        client.read_until(lambda: client.tokens.keys() >= {*handles})
        assert group_of(boss.status(), 1).num_running > 0

        answer = drain(boss, "two")
        moved = boss.status()
        assert (answer.nodes, answer.num_leaving) == (("two",), 1)
        assert supervisor.next_of(AvoidNodes) == AvoidNodes(("two",))
        assert supervisor.next_of(RetireGroup) == RetireGroup(1, 1)
        assert supervisor.next_of(StartGroup) == StartGroup(2, 1)
        supervisor.send(GroupStopped(1, 1))
        wait_for_status(boss, lambda status: group_of(status, 1).state == "retired")
        assert drain(boss, "two").num_leaving == 0
        client.finish(*handles)
        back = drain(boss, "two", undo=True)
        assert supervisor.next_of(AvoidNodes) == AvoidNodes(())

    assert group_of(moved, 1).num_running == 0
    assert moved.drained_nodes == ("two",)
    assert back.nodes == ()
    assert all(client.tokens[handle] == tokens_after(4, 120) for handle in handles)
    assert rig.exit_codes["1.1.0"] == 0


def test_a_cluster_of_one_host_says_that_nothing_can_leave_it(tmp_path: Path) -> None:
    with Rig(tmp_path, is_one_host=True) as rig:
        rig.start_worker()
        answer = drain(rig.client(), "here")

    assert "has to be on this host" in answer.refusal
    assert answer.nodes == ()
