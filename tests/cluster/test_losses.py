"""What becomes of requests when worker groups are lost: real sockets, scripted workers."""

import logging
import threading
from pathlib import Path

import pytest

from cluster.loss_reasons import LossReason
from cluster.messages.faults import Fault, FaultInjected, InjectFault
from cluster.messages.reports import EngineMetrics, MetricsRequest
from cluster.messages.supervisor import GroupLost, GroupStopped, StartGroup
from cluster.messages.workers import WorkerFailed
from scheduler.request import Finish
from tests.cluster.cluster_rig import Rig, TestSupervisor, group_of, wait_for_status
from tests.cluster.scripted import Script, tokens_after


def restart(rig: Rig, supervisor: TestSupervisor, script: Script | None = None) -> None:
    """Do what the engine asks for after a loss: end one epoch, start the next."""
    lost = supervisor.next_of(GroupLost)
    assert lost.restarts
    supervisor.send(GroupStopped(lost.group, lost.epoch))
    start = supervisor.next_of(StartGroup)
    rig.start_worker(script, group=start.group, epoch=start.epoch)


def test_a_recovery_leaves_one_line_with_its_phases_and_counts_in_the_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="stoker")
    monkeypatch.setattr(logging.getLogger("stoker"), "propagate", True)
    with Rig(tmp_path, max_restarts=1) as rig:
        rig.start_worker(Script(raise_at_step=8))
        supervisor, client = rig.supervisor(), rig.client()
        handle = client.submit(max_tokens=40)
        restart(rig, supervisor)
        client.finish(handle)
        client.send(MetricsRequest())
        metrics = client.next_of(EngineMetrics)
        group = group_of(client.status())

    records = set(caplog.records)  # each may be seen on its way up and at the root
    (line,) = [r.getMessage() for r in records if "group_recovered" in r.getMessage()]
    assert "reason=raised rank=0 outcome=restarted num_moved=1 num_starts=1" in line
    for phase in ("noticed", "fenced", "paused", "respawned", "weights", "ready", "first_token"):
        assert f" {phase}_s=" in line
    restarts = {s.labels: s.value for s in metrics.values["group_restarts"]}
    assert restarts["raised",] == 1
    assert sum(restarts.values()) == 1
    seconds = {d.labels: sum(d.counts) for d in metrics.distributions["recovery_seconds"]}
    assert seconds["first_token",] == seconds["fenced",] == 1
    assert (group.num_restarts, group.epoch) == (1, 2)
    assert "a kernel went wrong" in group.message


def test_streams_go_on_in_another_group_before_the_lost_one_is_back(tmp_path: Path) -> None:
    with Rig(tmp_path, num_groups=2, max_restarts=1) as rig:
        rig.start_worker(Script(raise_at_step=8), group=0)
        rig.start_worker(group=1)
        supervisor, client = rig.supervisor(), rig.client()
        wait_for_status(client, lambda s: all(g.state == "ready" for g in s.groups))
        handles = [client.submit(num_prompt=5 + i, max_tokens=40) for i in range(6)]
        assert supervisor.next_of(GroupLost).restarts
        client.finish(*handles)

        assert [client.tokens[h] for h in handles] == [tokens_after(5 + i, 40) for i in range(6)]


def test_requests_wait_for_a_group_that_comes_back(tmp_path: Path) -> None:
    with Rig(tmp_path, max_restarts=1) as rig:
        rig.start_worker(Script(raise_at_step=3))
        supervisor, client = rig.supervisor(), rig.client()
        first = client.submit(max_tokens=20)
        wait_for_status(client, lambda s: s.state == "recovering")
        late = client.submit(num_prompt=7, max_tokens=20)
        restart(rig, supervisor)
        client.finish(first, late)

        assert client.tokens == {first: tokens_after(4, 20), late: tokens_after(7, 20)}


def test_who_waits_too_long_for_a_first_token_is_refused_until_a_group_serves(
    tmp_path: Path,
) -> None:
    with Rig(tmp_path, max_restarts=1, no_workers_s=0.2) as rig:
        rig.start_worker(Script(raise_at_step=3))
        supervisor, client = rig.supervisor(), rig.client()
        begun = client.submit(max_tokens=20)
        wait_for_status(client, lambda s: s.state == "recovering")
        waiting = client.submit(max_tokens=20)
        client.finish(waiting)
        client.finish(late := client.submit(max_tokens=20))

        for handle in (waiting, late):
            assert client.rejections[handle].reason == "no_workers"
            assert "no_workers_s=0.2" in client.rejections[handle].message
            assert client.rejections[handle].retry_after_s
        assert client.status().num_waiting == 1

        restart(rig, supervisor)
        wait_for_status(client, lambda s: s.state == "serving")
        client.finish(begun, again := client.submit(max_tokens=20))
        assert client.tokens[begun] == client.tokens[again] == tokens_after(4, 20)


def test_a_group_that_cannot_come_back_is_given_up_and_who_waits_is_refused(
    tmp_path: Path,
) -> None:
    with Rig(tmp_path, max_restarts=2) as rig:
        rig.start_worker(Script(raise_at_step=3))
        supervisor, client = rig.supervisor(), rig.client()
        wait_for_status(client, lambda s: s.state == "serving")
        client.submit(max_tokens=20)
        wait_for_status(client, lambda s: s.state == "recovering")
        waiting = client.submit(max_tokens=20)
        restart(rig, supervisor, Script(fail_at_load="no weights"))
        restart(rig, supervisor, Script(fail_at_load="no weights"))
        lost = supervisor.next_of(GroupLost)
        client.finish(waiting)

        assert not lost.restarts
        assert client.rejections[waiting].reason == "no_workers"
        assert client.rejections[waiting].retry_after_s is None
        assert "no weights" in client.rejections[waiting].message
        assert client.status().state == "failed"


def test_a_request_that_breaks_groups_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    """The prompt that holds the token breaks every group; two losses cost no more than it."""
    script = Script(raise_at_token=70)
    with Rig(tmp_path, max_restarts=1) as rig:
        rig.start_worker(script)
        supervisor, client = rig.supervisor(), rig.client()
        poison = client.submit(max_tokens=20, num_prompt=60)
        restart(rig, supervisor, script)
        other = client.submit(max_tokens=20)
        restart(rig, supervisor, script)
        client.finish(poison, other)

        assert client.ends[poison] is Finish.ERROR
        assert "failed 2 times while it computed this request" in client.messages[poison]
        assert client.messages[poison].count("this token breaks the kernel") == 2
        assert client.tokens[other] == tokens_after(4, 20)


@pytest.mark.parametrize("reason", ["node", "ended", "cut"])
def test_losses_that_no_request_can_cause_are_held_against_nobody(
    reason: LossReason, tmp_path: Path
) -> None:
    hold = threading.Event()
    script = Script(hold=hold)
    with Rig(tmp_path, max_restarts=3) as rig:
        rig.start_worker(script)
        supervisor, client = rig.supervisor(), rig.client()
        handle = client.submit(max_tokens=20)
        for epoch in (1, 2, 3):
            wait_for_status(client, lambda status: status.num_running == 1)
            supervisor.send(WorkerFailed(group=0, epoch=epoch, rank=0, message="?", reason=reason))
            restart(rig, supervisor, script)
        hold.set()
        client.finish(handle)

        assert client.tokens[handle] == tokens_after(4, 20)


def test_the_end_of_a_group_that_was_ordered_to_suffer_is_held_against_nobody(
    tmp_path: Path,
) -> None:
    hold = threading.Event()
    script = Script(hold=hold)
    with Rig(tmp_path, max_restarts=3, allow_chaos=True) as rig:
        rig.start_worker(script)
        supervisor, client = rig.supervisor(), rig.client()
        handle = client.submit(max_tokens=20)
        for epoch in (1, 2, 3):
            wait_for_status(client, lambda status: status.num_running == 1)
            client.send(InjectFault(fault=Fault(kind="raise"), group=0, rank=0))
            assert not client.next_of(FaultInjected).refusal
            supervisor.send(WorkerFailed(group=0, epoch=epoch, rank=0, message="killed"))
            restart(rig, supervisor, script)
        hold.set()
        client.finish(handle)

        assert client.tokens[handle] == tokens_after(4, 20)


def test_a_late_answer_of_a_lost_epoch_is_not_taken(tmp_path: Path) -> None:
    hold = threading.Event()
    with Rig(tmp_path, max_restarts=1, step_timeout_s=0.3) as rig:
        rig.start_worker(Script(hold=hold))
        supervisor, client = rig.supervisor(), rig.client()
        handle = client.submit(max_tokens=20)
        restart(rig, supervisor)
        hold.set()
        client.finish(handle)

        assert client.tokens[handle] == tokens_after(4, 20)
