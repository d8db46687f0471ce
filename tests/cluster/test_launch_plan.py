"""What the engine and the workers are told."""

from pathlib import Path

import msgspec
import pytest

from cluster.backend import Place, decode_launch, encode_launch
from cluster.config import config_from
from cluster.errors import BackendError
from cluster.keys import SocketKeys
from cluster.launch_plan import LaunchPlan
from cluster.links.sockets import fresh_keys


def make_plan(keys: SocketKeys | None = None, **settings: object) -> LaunchPlan:
    return LaunchPlan(
        config=config_from(settings).resolved(has_gpu=False),
        model="m",
        model_dir=Path("/models/m"),
        engine_id="id",
        key="secret",
        cores=(0, 1, 2, 3),
        front_keys=None if keys is None else fresh_keys(),
        back_keys=keys,
    )


def make_place(rank: int, *, node: str = "a", cores: tuple[int, ...] = ()) -> Place:
    return Place(rank=rank, node=node, host=f"host-{node}", cores=cores)


def test_the_settings_reach_the_scheduler_and_the_workers() -> None:
    plan = make_plan(
        max_num_seqs=7, block_size=8, num_kv_blocks=12, step_timeout_s=3.0, enforce_eager=True
    )
    engine = plan.engine("ipc:///f", "ipc:///b")
    (worker,) = plan.workers("ipc:///b", 0, 1, [make_place(0)])

    assert engine.scheduler.max_num_seqs == worker.runner.max_num_seqs == 7
    assert engine.scheduler.block_size == worker.runner.block_size == 8
    assert worker.runner.num_kv_blocks == 12
    assert worker.runner.enforce_eager
    assert engine.step_timeout_s == 3.0
    assert worker.rendezvous.timeout_s < 3.0  # so that ranks can say who is late
    assert (worker.engine_id, worker.key) == (engine.engine_id, engine.key) == ("id", "secret")
    assert worker.runner.device == "cpu"


def test_each_rank_computes_on_its_own_cores() -> None:
    plan = make_plan(tensor_parallel_size=2)
    workers = plan.workers(
        "ipc:///b", 0, 1, [make_place(0, cores=(0, 1)), make_place(1, cores=(2, 3))]
    )
    assert [worker.cores for worker in workers] == [(0, 1), (2, 3)]
    assert [worker.runner.num_threads for worker in workers] == [2, 2]


def test_ranks_that_are_not_pinned_share_the_threads() -> None:
    plan = make_plan(tensor_parallel_size=2, num_groups=2, pin_cores=False)
    places = [make_place(rank) for rank in range(2)]
    workers = plan.workers("ipc:///b", 0, 1, places)
    assert [worker.cores for worker in workers] == [(), ()]
    assert [worker.runner.num_threads for worker in workers] == [1, 1]
    assert workers[0].runner.ranks_on_host == 4


def test_the_ranks_of_a_group_are_those_of_all_its_stages() -> None:
    plan = make_plan(tensor_parallel_size=2, pipeline_parallel_size=2, num_groups=3)
    places = [make_place(rank, node="ab"[rank // 2]) for rank in range(4)]
    workers = plan.workers("tcp://10.0.0.1:7000", 0, 1, places)

    assert plan.config.num_ranks == 12
    assert plan.engine("ipc:///f", "ipc:///b").num_ranks == 4
    assert plan.engine("ipc:///f", "ipc:///b").scheduler.num_stages == 2
    assert [(each.num_ranks, each.pipeline_parallel_size) for each in workers] == [(4, 2)] * 4
    assert workers[0].rendezvous.nodes == (0, 0, 1, 1)


def test_each_start_of_each_group_meets_under_its_own_name() -> None:
    plan = make_plan(num_groups=2)
    names = {
        plan.workers("ipc:///b", group, epoch, [make_place(0)])[0].rendezvous.name
        for group in range(2)
        for epoch in (1, 2)
    }
    assert len(names) == 4


def test_ranks_on_several_hosts_need_an_address_that_they_can_dial() -> None:
    plan = make_plan(tensor_parallel_size=2)
    places = [make_place(0, node="a"), make_place(1, node="b")]
    with pytest.raises(BackendError, match=r"host-a, host-b.*back_address=tcp://HOST:0"):
        plan.workers("ipc:///b", 0, 1, places)
    workers = plan.workers("tcp://10.0.0.1:7000", 0, 1, places)
    assert not workers[0].rendezvous.is_one_host


def test_workers_and_engine_hold_their_own_ends_of_the_back_sockets_keys_only() -> None:
    keys = fresh_keys()
    plan = make_plan(keys)
    (worker,) = plan.workers("tcp://10.0.0.1:7000", 0, 1, [make_place(0)])
    engine = plan.engine("tcp://10.0.0.1:0", "tcp://10.0.0.1:0")
    assert plan.front_keys is not None
    assert worker.link_keys == keys.client
    assert keys.server.secret.encode() not in encode_launch(worker)
    assert plan.front_keys.client.secret.encode() not in encode_launch(worker)
    assert (engine.front_keys, engine.back_keys) == (plan.front_keys.server, keys.server)
    assert keys.client.secret.encode() not in msgspec.json.encode(engine)
    assert decode_launch(encode_launch(worker)) == worker
