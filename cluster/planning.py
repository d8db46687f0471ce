"""What of a model fits where, worked out without starting anything.

The sums are those of start-up (`worker.estimate`, `worker.budget`); what start-up measures, free
memory and what a process takes beside weights, is assumed here, and each assumption has a name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from cluster.engine_config import EngineConfig
from cluster.gpus import Gpu
from cluster.groups import RANK_BYTES
from kvcache.geometry import KVGeometry
from worker.budget import num_blocks_for, share_of_device, share_of_host
from worker.config import RunnerConfig
from worker.errors import PoolTooLarge, PoolTooSmall
from worker.estimate import (
    DTYPE_BYTES,
    Form,
    activation_bytes,
    kv_geometry,
    largest_context,
    read_bytes,
    requests_at_once,
    weight_bytes,
)
from worker.models.spec import ModelSpec, model_stages, model_widths
from worker.shards import ImpossibleShards, Shard, deal_shards
from worker.stages import ImpossibleStages, Stage

MIB = 2**20

CLUSTER_BYTES = 300 * MIB
"""Of the other processes of a cluster on its first host: engine, supervisor, API server."""

GPU_PROCESS_BYTES = 1024 * MIB
"""Of a GPU rank beside weights, steps and K/V: the driver's context, libraries' workspaces,
recorded graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal nodes with equal GPUs, or with CPUs only."""

    name: str
    num_nodes: int = 1
    slots_per_node: int = 1
    """GPUs; or cores, of which each rank needs one."""
    gpu: Gpu | None = None
    host_bytes: int = 0
    """Free on each node before anything starts, where ranks compute on CPUs."""
    level: str = "avx512"
    """See `worker.estimate.Form`."""

    @property
    def num_slots(self) -> int:
        return self.num_nodes * self.slots_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks, and how they share the model."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    num_groups: int

    @property
    def ranks_per_group(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_group * self.num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What is expected of one rank of a group."""

    rank: int
    stage: Stage
    shard: Shard
    weight_bytes: int
    activation_bytes: int
    geometry: KVGeometry
    free_bytes: int
    """With all weights loaded."""
    budget_bytes: int
    """For K/V; negative where even the weights do not fit."""
    num_blocks: int
    """0 where one sequence of `max_model_len` does not fit."""
    refusal: str = ""
    """Of K/V that were asked for and are not free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What is expected of each group of a layout."""

    layout: Layout
    max_model_len: int
    ranks: tuple[RankPlan, ...]
    num_blocks: int
    """The least of its ranks."""
    problem: str = ""
    """Why it does not work; empty if it does."""

    @property
    def works(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What runs at once in one group."""

    largest_context: int
    """Tokens of the longest sequence."""
    num_requests: int
    """Of the asked lengths."""
    stream_tokens_per_s: float
    """Limit of one request alone; 0: not known."""
    group_tokens_per_s: float
    """Limit of `num_requests` at once; 0: not known."""


class Planner:
    """One model on one kind of machine, under one set of settings."""

    def __init__(self, spec: ModelSpec, config: EngineConfig, machine: Machine) -> None:
        """Args: config: resolved for the machine."""
        self._spec, self._config, self._machine = spec, config, machine
        dtype = spec.dtype if config.dtype == "auto" else config.dtype
        self.form = Form(
            dtype=dtype,
            kv_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            ops=config.device if config.ops == "auto" else config.ops,
            device=config.device,
            is_int8=config.quantization == "int8",
            level=machine.level,
        )
        self.max_model_len = min(config.max_model_len or spec.max_context_len, spec.max_context_len)

    def layouts(self) -> Iterator[Layout]:
        """What may be asked of the machine: sizes of stages up to a node's slots, every number of
        stages that leaves each node whole ones, and as many groups as there is room for."""
        machine = self._machine
        for stages in _sizes(min(machine.num_slots, self._spec.num_layers)):
            for ranks in _sizes(machine.slots_per_node):
                whole = machine.slots_per_node // ranks * machine.num_nodes
                if whole >= stages:
                    yield Layout(
                        tensor_parallel_size=ranks,
                        pipeline_parallel_size=stages,
                        num_groups=whole // stages,
                    )

    def plan(self, layout: Layout) -> GroupPlan:
        """One layout, whether it works or not."""
        spec, machine = self._spec, self._machine
        try:
            shards = deal_shards(model_widths(spec), layout.tensor_parallel_size)
            stages = model_stages(spec, layout.pipeline_parallel_size)
        except ImpossibleShards as error:
            legal = [size for size in error.legal_sizes if size <= 2 * spec.num_kv_heads]
            return self._impossible(
                layout,
                f"{error.size} ranks cannot share {spec.num_heads} query and {spec.num_kv_heads} "
                f"KV heads; {', '.join(map(str, legal))} can",
            )
        except ImpossibleStages as error:
            return self._impossible(layout, f"{error.size} stages, {error.num_layers} layers")
        if machine.gpu is not None and layout.num_ranks > machine.num_slots:
            return self._impossible(
                layout, f"{layout.num_ranks} ranks need as many GPUs; there are {machine.num_slots}"
            )
        return self._fill(layout, [(stage, shard) for stage in stages for shard in shards])

    def fit(self, plan: GroupPlan, num_tokens: int) -> Fit:
        """What a plan that works holds at once, of requests of so many tokens each."""
        config = self._config
        count = requests_at_once(
            plan.num_blocks, config.block_size, num_tokens, config.max_num_seqs
        )
        return Fit(
            largest_context=largest_context(plan.num_blocks, config.block_size, plan.max_model_len),
            num_requests=count,
            stream_tokens_per_s=self._limit(plan, 1, num_tokens),
            group_tokens_per_s=self._limit(plan, count, num_tokens),
        )

    def _impossible(self, layout: Layout, problem: str) -> GroupPlan:
        return GroupPlan(
            layout=layout,
            max_model_len=self.max_model_len,
            ranks=(),
            num_blocks=0,
            problem=problem,
        )

    def _fill(self, layout: Layout, parts: list[tuple[Stage, Shard]]) -> GroupPlan:
        weights = [
            weight_bytes(self._spec, shard, stage, self.form, self.max_model_len)
            for stage, shard in parts
        ]
        on_host = -(-layout.num_ranks // self._machine.num_nodes)
        copies = on_host / layout.ranks_per_group
        if self._config.warm_weights and self.form.ops == "cpu":
            copies = min(copies, 1.0)  # groups of a host share one
        beside = int(copies * sum(weights)) + on_host * RANK_BYTES + CLUSTER_BYTES
        ranks = tuple(
            self._rank(rank, stage, shard, weights[rank], layout, on_host, beside)
            for rank, (stage, shard) in enumerate(parts)
        )
        worst = min(ranks, key=lambda each: each.num_blocks)
        return GroupPlan(
            layout=layout,
            max_model_len=self.max_model_len,
            ranks=ranks,
            num_blocks=worst.num_blocks,
            problem="" if worst.num_blocks else self._too_small(worst),
        )

    def _rank(
        self,
        rank: int,
        stage: Stage,
        shard: Shard,
        weights: int,
        layout: Layout,
        on_host: int,
        taken_on_host: int,
    ) -> RankPlan:
        config, machine = self._config, self._machine
        assert config.max_num_batched_tokens is not None, "resolved comes first"
        step = activation_bytes(
            self._spec,
            shard,
            stage,
            self.form,
            max_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
        )
        if machine.gpu is not None:
            total = machine.gpu.memory_bytes
            measured = share_of_device(
                total_bytes=total,
                free_bytes=total - weights - GPU_PROCESS_BYTES,
                activation_bytes=step,
                utilization=config.gpu_memory_utilization,
            )
        else:
            measured = share_of_host(
                free_bytes=machine.host_bytes - taken_on_host,
                activation_bytes=step,
                utilization=config.gpu_memory_utilization,
                ranks_on_host=on_host,
            )
        geometry = kv_geometry(
            self._spec, shard, stage.layers.size, self.form.kv_dtype, config.block_size
        )
        asked = RunnerConfig(
            model_dir=Path(),
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            num_kv_blocks=config.num_kv_blocks,
        )
        refusal = ""
        try:
            num_blocks = num_blocks_for(asked, geometry, self.max_model_len, measured)
        except PoolTooSmall:
            num_blocks = 0
        except PoolTooLarge as error:
            num_blocks, refusal = 0, str(error)
        return RankPlan(
            rank=rank,
            stage=stage,
            shard=shard,
            weight_bytes=weights,
            activation_bytes=step,
            geometry=geometry,
            free_bytes=measured.free_bytes,
            budget_bytes=measured.budget_bytes,
            num_blocks=num_blocks,
            refusal=refusal,
        )

    def _too_small(self, rank: RankPlan) -> str:
        if rank.refusal:
            return rank.refusal
        wanted = rank.geometry.bytes_for(self.max_model_len)
        tokens = rank.geometry.blocks_in(rank.budget_bytes) * rank.geometry.block_size
        if not tokens:
            missing = _gib(wanted - rank.budget_bytes)
            return f"{_gib(rank.weight_bytes)} of weights a rank: {missing} short of any use"
        return (
            f"K/V for {tokens} tokens only, less than a context of {self.max_model_len}; "
            f"max_model_len={tokens} would do"
        )

    def _limit(self, plan: GroupPlan, num_requests: int, num_tokens: int) -> float:
        """Tokens per second that no decode step can exceed: each reads the weights, and the K/V of
        its sequences, from memory once (Williams et al. 2009, the roofline model). Stages work
        side by side on their parts of the sequences."""
        gpu = self._machine.gpu
        if gpu is None or not gpu.bandwidth_gb_s or not num_requests:
            return 0.0
        num_stages = plan.layout.pipeline_parallel_size
        at_once = max(1, num_requests // num_stages)
        times = [0.0] * num_stages
        for rank in plan.ranks:
            weights = read_bytes(self._spec, rank.shard, rank.stage, self.form)
            read = weights + at_once * num_tokens * rank.geometry.token_bytes
            computed = 2 * at_once * weights / DTYPE_BYTES[self.form.dtype]
            seconds = max(read / (gpu.bandwidth_gb_s * 1e9), computed / (gpu.bf16_tflops * 1e12))
            times[rank.stage.index] = max(times[rank.stage.index], seconds)
        return at_once / (sum(times) if num_requests < num_stages else max(times))


def choose(planner: Planner) -> GroupPlan | None:
    """The layout to take unless one is asked for: as many groups as work, each with all the ranks
    that leaves it, and stages only where a node is too small."""
    working = [plan for plan in map(planner.plan, planner.layouts()) if plan.works]
    if not working:
        return None
    return min(
        working,
        key=lambda plan: (
            plan.layout.pipeline_parallel_size,
            -plan.layout.num_groups,
            -plan.layout.ranks_per_group,
        ),
    )


def resolved_for(config: EngineConfig, machine: Machine) -> EngineConfig:
    """The settings as they would be on such a machine.

    Raises:
        ConfigError: settings that do not fit together, or not to the machine.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if machine.gpu else "cpu"
    return replace(config, device=device).resolved(has_gpu=machine.gpu is not None)


def _sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, …: powers of two and their halves more, and the most."""
    found = {most} if most < 9 else set()
    size = 1
    while size <= most:
        found |= {each for each in (size, size + size // 2) if each <= most}
        size *= 2
    return sorted(found)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
