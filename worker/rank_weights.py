"""One rank's weights: mapped from a copy that its host keeps, or read, and then kept for others."""

import os
from contextlib import suppress
from dataclasses import dataclass

import torch

from worker.config import RunnerConfig
from worker.errors import UnfitWeights
from worker.estimate import Form, weight_bytes
from worker.kept_weights import WeightKeeper
from worker.models import weight_form
from worker.models.decoder import DecoderWeights
from worker.models.loading import WeightLoader
from worker.models.spec import ModelSpec
from worker.ops.cpu import CpuOperations
from worker.ops.native import team
from worker.ops.native.arena import Arena
from worker.ops.table import Operations
from worker.shards import Shard
from worker.stages import Stage
from worker.weight_memory import SharedArena, map_sealed
from worker.weights import Checkpoint, Report

ROOM = 2
"""Addresses for so many times the weights that are expected; what is not used costs nothing."""

LEAST_ROOM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """Which weights a rank wants, and in which form."""

    spec: ModelSpec
    shard: Shard
    stage: Stage
    form: Form
    dtype: torch.dtype
    max_model_len: int

    @property
    def name(self) -> str:
        return (
            f"stage {self.stage.index} of {self.stage.size}, "
            f"rank {self.shard.rank} of {self.shard.size}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """What a rank got."""

    weights: DecoderWeights
    was_mapped: bool
    """Nothing was read: another rank of this host has done it before."""
    is_shared: bool
    """Others of this host may hold the same memory."""


def load_rank_weights(
    config: RunnerConfig,
    part: RankPart,
    ops: Operations,
    device: torch.device,
    keeper: WeightKeeper | None,
    report: Report,
) -> RankWeights:
    """A rank's weights, packed for `ops`.

    Raises:
        DamagedCheckpoint: a file or tensor is missing, truncated or not as described.
    """
    arena, is_shared = None, False
    if keeper is not None and isinstance(ops, CpuOperations):
        kept = _borrowed(keeper, part, ops)
        if kept is not None:
            return RankWeights(weights=kept, was_mapped=True, is_shared=True)
        arena = _arena(part)
        if arena is None:
            keeper.close()  # whoever waits for us need not
        else:
            ops.team.arena = arena
    with (
        torch.inference_mode(),
        Checkpoint(config.model_dir, part.dtype, report) as checkpoint,
    ):
        loader = WeightLoader(checkpoint, part.spec, part.shard, part.stage, ops, device, arena)
        weights = loader.load(part.max_model_len)
    if arena is not None:
        assert keeper is not None
        assert isinstance(ops, CpuOperations)
        ops.team.arena = Arena()
        is_shared = _lent(keeper, arena.seal(weight_form.describe(weights, arena.memory)))
    return RankWeights(weights=weights, was_mapped=False, is_shared=is_shared)


def _borrowed(keeper: WeightKeeper, part: RankPart, ops: CpuOperations) -> DecoderWeights | None:
    form = part.form
    kinds = f"{form.dtype} {'int8' if form.is_int8 else 'plain'} {ops.team.level}"
    versions = f"{weight_form.VERSION}.{team.VERSION}"
    fd = keeper.borrow(part.name, f"{versions} {kinds} {part.max_model_len}")
    if fd is None:
        return None
    try:
        return weight_form.weights_in(*map_sealed(fd))
    except UnfitWeights:
        keeper.close()
        return None
    finally:
        os.close(fd)


def _lent(keeper: WeightKeeper, fd: int) -> bool:
    try:
        return keeper.lend(fd)
    finally:
        os.close(fd)


def _arena(part: RankPart) -> SharedArena | None:
    """None: the system does not let this process share so much."""
    expected = weight_bytes(part.spec, part.shard, part.stage, part.form, part.max_model_len)
    with suppress(OSError):
        return SharedArena(max(ROOM * expected, LEAST_ROOM_BYTES))
    return None
