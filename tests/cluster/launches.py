"""Builders of what worker processes are started with."""

from cluster.backend import Rendezvous, RunnerSpec, WorkerLaunch
from cluster.keys import ClientKeys


def make_spec(*, max_model_len: int | None = 256, num_kv_blocks: int | None = 64) -> RunnerSpec:
    return RunnerSpec(
        model_dir="/nowhere",
        dtype="float32",
        device="cpu",
        ops="auto",
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=max_model_len,
        gpu_memory_utilization=0.5,
        num_kv_blocks=num_kv_blocks,
    )


def make_launch(
    *,
    address: str = "ipc:///nowhere",
    key: str = "key",
    group: int = 0,
    epoch: int = 1,
    rank: int = 0,
    num_ranks: int = 1,
    num_stages: int = 1,
    spec: RunnerSpec | None = None,
    link_keys: ClientKeys | None = None,
    allow_chaos: bool = False,
) -> WorkerLaunch:
    return WorkerLaunch(
        engine_id="engine",
        key=key,
        address=address,
        group=group,
        epoch=epoch,
        rank=rank,
        num_ranks=num_ranks,
        pipeline_parallel_size=num_stages,
        runner=spec if spec is not None else make_spec(),
        rendezvous=Rendezvous(name=f"stoker-test-{group}-{epoch}"),
        connect_timeout_s=5.0,
        link_keys=link_keys,
        allow_chaos=allow_chaos,
    )
