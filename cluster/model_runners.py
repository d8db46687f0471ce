"""Builds the real runner of a rank from its launch. Importing this imports torch."""

import socket
from pathlib import Path

import torch

from cluster.backend import WorkerLaunch
from cluster.keeper_link import KeeperLink
from worker.config import RunnerConfig
from worker.meeting import Company, Terms, meet_group
from worker.models.spec import read_spec
from worker.parallel import Communicator, MeetingPoint
from worker.pipeline import Pipes
from worker.runner import ModelRunner


def build_runner(launch: WorkerLaunch) -> ModelRunner:
    """Meet the group's other ranks and read the model's config; no weights yet.

    Raises:
        ValueError, ModelError, ImpossibleShards: the settings or the model cannot be served.
        MeetingFailed: the other ranks did not come.
    """
    config = runner_config(launch)
    if config.device == "cuda":
        torch.cuda.set_device(launch.gpu)
    communicator, pipes = meet(launch)
    keeper = None
    if launch.keeper:
        keeper = KeeperLink(launch.keeper, launch.key, config.model_dir)
    try:
        return ModelRunner(config, communicator, pipes, keeper)
    except BaseException:
        communicator.close()
        pipes.close()
        raise


def runner_config(launch: WorkerLaunch) -> RunnerConfig:
    """The launch in the worker's own words."""
    spec = launch.runner
    return RunnerConfig(
        model_dir=Path(spec.model_dir),
        dtype=spec.dtype,
        kv_cache_dtype=spec.kv_cache_dtype,
        quantization=spec.quantization,
        device=spec.device,
        ops=spec.ops,
        tensor_parallel_size=launch.num_ranks // launch.pipeline_parallel_size,
        pipeline_parallel_size=launch.pipeline_parallel_size,
        rank=launch.rank,
        ranks_on_host=spec.ranks_on_host,
        block_size=spec.block_size,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_model_len=spec.max_model_len,
        gpu_memory_utilization=spec.gpu_memory_utilization,
        kv_cache_memory_bytes=spec.kv_cache_memory_bytes,
        num_kv_blocks=spec.num_kv_blocks,
        enforce_eager=spec.enforce_eager,
        num_threads=spec.num_threads,
    )


def meet(launch: WorkerLaunch) -> tuple[Communicator, Pipes]:
    """Meet the group's other ranks where the launch says."""
    place, spec = launch.rendezvous, launch.runner
    nodes = place.nodes or (() if place.is_one_host else tuple(range(launch.num_ranks)))
    listener = None if place.listener_fd is None else socket.socket(fileno=place.listener_fd)
    width = read_spec(Path(spec.model_dir)).hidden_size
    return meet_group(
        MeetingPoint(name=place.name, host=place.store_host, port=place.store_port),
        Company(
            rank=launch.rank,
            num_stages=launch.pipeline_parallel_size,
            ranks_per_stage=launch.num_ranks // launch.pipeline_parallel_size,
            nodes=nodes,
        ),
        Terms(
            device=torch.device(spec.device),
            step_bytes=spec.max_num_batched_tokens * width * torch.float32.itemsize,
            start_timeout_s=place.start_timeout_s,
            timeout_s=place.timeout_s,
            own_address=place.hosts[launch.rank] if place.hosts else "",
        ),
        listener,
    )
