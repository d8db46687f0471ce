"""Faults that are ordered at the front socket: what a rank suffers, and what becomes of it."""

from pathlib import Path

import pytest

from cluster.loss_reasons import EXIT_FAILED, EXIT_NO_ENGINE
from cluster.messages.faults import Fault, FaultInjected, InjectFault
from tests.cluster.cluster_rig import Rig, TestClient, group_of, wait_for_status
from tests.cluster.scripted import tokens_after


def inject(client: TestClient, fault: Fault, group: int = 0, rank: int = 0) -> FaultInjected:
    client.send(InjectFault(fault=fault, group=group, rank=rank))
    return client.next_of(FaultInjected)


def test_a_cluster_that_does_not_allow_faults_has_none(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        answer = inject(client, Fault(kind="raise"))
        assert "allow_chaos" in answer.refusal
        handle = client.submit(max_tokens=4)
        client.finish(handle)
        assert client.tokens[handle] == tokens_after(4, 4)


def test_an_exception_at_a_step_fails_the_group_as_one_of_a_kernel_does(tmp_path: Path) -> None:
    with Rig(tmp_path, allow_chaos=True) as rig:
        rig.start_worker()
        client = rig.client()
        assert inject(client, Fault(kind="raise", step=3)).ranks == ((0, 0),)
        handle = client.submit(max_tokens=9)
        client.finish(handle)
        assert "injected at step 3" in group_of(client.status()).message
    assert rig.exit_codes["0.1.0"] == EXIT_FAILED


def test_only_the_rank_that_is_named_suffers(tmp_path: Path) -> None:
    with Rig(tmp_path, allow_chaos=True, num_groups=2) as rig:
        rig.start_worker(group=0)
        rig.start_worker(group=1)
        client = rig.client()
        wait_for_status(client, lambda now: all(group.state == "ready" for group in now.groups))
        handle = client.submit(max_tokens=9)
        inject(client, Fault(kind="cut"), group=1)
        client.finish(handle)
        status = wait_for_status(client, lambda now: group_of(now, 1).state != "ready")
        assert group_of(status, 0).state == "ready"
        assert client.tokens[handle] == tokens_after(4, 9)
    assert rig.exit_codes["1.1.0"] == EXIT_NO_ENGINE


def test_a_plan_that_is_lost_on_its_way_is_a_step_without_an_answer(tmp_path: Path) -> None:
    with Rig(tmp_path, allow_chaos=True, step_timeout_s=0.5, max_plans_in_flight=1) as rig:
        rig.start_worker()
        client = rig.client()
        inject(client, Fault(kind="miss"))
        handle = client.submit(max_tokens=9)
        client.finish(handle)
        assert "step 1 was not answered" in group_of(client.status()).message


def test_an_answer_that_is_lost_on_its_way_is_never_passed_over(tmp_path: Path) -> None:
    with Rig(tmp_path, allow_chaos=True, step_timeout_s=5.0) as rig:
        rig.start_worker()
        client = rig.client()
        inject(client, Fault(kind="drop"))
        handle = client.submit(max_tokens=9)
        client.finish(handle)
        assert "answered step 2, expected 1" in group_of(client.status()).message
        assert not client.tokens.get(handle)


@pytest.mark.parametrize("kind", ["slow", "delay"])
def test_what_only_takes_time_changes_nothing(kind: str, tmp_path: Path) -> None:
    with Rig(tmp_path, allow_chaos=True) as rig:
        rig.start_worker()
        client = rig.client()
        inject(client, Fault(kind=kind, seconds=0.01, count=4))  # type: ignore[arg-type]
        handle = client.submit(max_tokens=9)
        client.finish(handle)
        assert client.tokens[handle] == tokens_after(4, 9)


def test_a_full_pool_lets_requests_wait_until_it_is_not(tmp_path: Path) -> None:
    with Rig(tmp_path, allow_chaos=True) as rig:
        rig.start_worker()
        client = rig.client()
        inject(client, Fault(kind="full", seconds=0.3))
        assert group_of(client.status()).num_used_blocks == 64
        handle = client.submit(max_tokens=40)
        client.finish(handle)
        assert client.tokens[handle] == tokens_after(4, 40)
        assert group_of(client.status()).num_used_blocks == 0


def test_nobody_is_hit_where_nobody_is(tmp_path: Path) -> None:
    with Rig(tmp_path, allow_chaos=True) as rig:
        rig.start_worker()
        client = rig.client()
        for group, rank in ((5, 0), (0, 7)):
            assert inject(client, Fault(kind="raise"), group, rank).refusal
        assert inject(client, Fault(kind="raise"), group=-1).refusal
        assert inject(client, Fault(kind="full"), group=9).refusal
