"""One rank's computing: plans in, results out."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcache.geometry import blocks_for
from scheduler.plan import StepPlan, StepResult
from worker.batch import ON_ITS_WAY, Slices, SlotTable
from worker.budget import num_blocks_for
from worker.config import RunnerConfig
from worker.estimate import Form, activation_bytes, kv_geometry
from worker.grammar import tokenizer_of
from worker.graphs import CudaCapture, DecodeGraphs, graph_sizes
from worker.guide import Guide
from worker.host_copy import HostCopy, to_device
from worker.host_memory import trim_heap
from worker.kept_weights import WeightKeeper
from worker.kv_store import KVStore, choose_kv_dtype
from worker.launched_step import LaunchedStep, StepParts
from worker.memory import Capacity, measure_memory
from worker.models.decoder import Decoder
from worker.models.spec import context_of, model_stages, model_widths, read_spec
from worker.ops.choice import find_draw, make_operations
from worker.ops.cpu import CpuOperations
from worker.ops.cpu_program import StepProgram
from worker.ops.table import BatchInputs, Operations
from worker.parallel import Communicator
from worker.pipeline import NO_PIPES, Pipes
from worker.rank_weights import RankPart, load_rank_weights
from worker.sampler import Sampler
from worker.shards import deal_shards
from worker.step_inputs import batch_on_device, largest_batch
from worker.step_tokens import StepTokens
from worker.weights import Report


class ModelRunner:
    """One rank of a worker group: its part of the model, its K/V and its slot table.

    Call `load`, `measure` and `allocate` once, in this order, then `execute` for each plan; after
    `reset`, plans begin anew.
    Every rank of the group makes the same calls. With several pipeline stages a rank waits for
    the stage before and passes on to the one after; the first rank of the last stage samples
    and answers, and every plan carries all of its tokens.
    """

    def __init__(
        self,
        config: RunnerConfig,
        communicator: Communicator,
        pipes: Pipes = NO_PIPES,
        keeper: WeightKeeper | None = None,
    ) -> None:
        """Read the model's config; no weights yet.

        Args:
            communicator: of the ranks of this one's stage.
            pipes: to the stages beside it.
            keeper: of this host's packed weights; only the CPU's own operations have use for it.

        Raises:
            ModelError: the model cannot be served, or not with so long a context.
            ImpossibleShards, ImpossibleStages: it cannot be dealt to this many ranks.
        """
        self._config, self._communicator, self._pipes = config, communicator, pipes
        self._keeper = keeper
        self._device = torch.device(config.device)
        self.spec = read_spec(config.model_dir)
        shards = deal_shards(model_widths(self.spec), config.tensor_parallel_size)
        self._shard = shards[config.rank_in_stage]
        self.max_model_len = context_of(self.spec, config.max_model_len, config.model_dir)
        self.dtype = choose_dtype(config.dtype, self.spec.dtype)
        self._ops: Operations = make_operations(
            config.ops, config.device, config.num_threads, config.quantization
        )
        self._kv_dtype = choose_kv_dtype(config.kv_cache_dtype, self.dtype, self._ops.name)
        self._form = Form(
            dtype=_name(self.dtype),
            kv_dtype=_name(self._kv_dtype),
            ops=self._ops.name,
            device=config.device,
            is_int8=config.quantization == "int8",
        )
        self._stage = model_stages(self.spec, config.pipeline_parallel_size)[config.stage]
        self._geometry = kv_geometry(
            self.spec,
            self._shard,
            self._stage.layers.size,
            self._form.kv_dtype,
            config.block_size,
        )
        self._decoder: Decoder | None = None
        self._shares_weights = False
        self._store: KVStore | None = None
        self._table: SlotTable | None = None
        self._graphs: DecodeGraphs | None = None
        self._program: StepProgram | None = None
        self._last_tokens: Tensor | None = None
        """By slot, the last sampled token: a GPU goes on with it before the host knows it."""
        if self._runs_ahead and config.pipeline_parallel_size == 1:
            self._last_tokens = torch.zeros(
                config.max_num_seqs, dtype=torch.int64, device=self._device
            )
        self._incoming: Tensor | None = None
        """[max_num_batched_tokens, hidden], from the stage before"""
        self._forwarded_at = 0.0
        sampler: Sampler | None = None
        if self._stage.is_last and config.rank_in_stage == 0:
            vocab_size = self.spec.vocab_size
            guide = Guide(lambda: tokenizer_of(config.model_dir, vocab_size), vocab_size)
            sampler = Sampler(
                config.max_num_seqs, vocab_size, self._device, find_draw(self._ops), guide
            )
        self._tokens = StepTokens(
            communicator,
            [shard.vocab_rows.size for shard in shards],
            sampler,
            max_num_seqs=config.max_num_seqs,
            device=self._device,
        )
        torch.set_num_threads(config.num_threads)

    def load(self, report: Report = lambda done, total: None) -> bool:
        """Read this rank's slices of the weights, and report now and then (see `Checkpoint`); or
        map what the keeper has of them.

        Returns:
            whether they were mapped
        Raises:
            DamagedCheckpoint: a file or tensor is missing, truncated or not as described.
        """
        part = RankPart(
            spec=self.spec,
            shard=self._shard,
            stage=self._stage,
            form=self._form,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
        )
        got = load_rank_weights(self._config, part, self._ops, self._device, self._keeper, report)
        self._shares_weights = got.is_shared
        self._decoder = Decoder(
            self.spec, self._shard, self._stage, got.weights, self._ops, self._communicator
        )
        if not self._stage.is_first:
            self._incoming = torch.zeros(
                (self._config.max_num_batched_tokens, self.spec.hidden_size),
                dtype=self._ops.activation_dtype(self.dtype),
                device=self._device,
            )
        return got.was_mapped

    def measure(self) -> Capacity:
        """Run the largest step once and say how many KV blocks this rank could hold.

        Raises:
            PoolTooSmall: not enough for one request of `max_model_len`.
        """
        assert self._decoder is not None, "load comes before measure"
        # Every rank has loaded when this returns, so all see the same memory as free.
        self._communicator.all_reduce(torch.zeros(1, device=self._device))
        self._pipes.meet(torch.zeros(1, device=self._device))
        measured = measure_memory(self._config, self._device, self._profile, self._known_bytes())
        if self._uses_graphs:
            measured = measured.less(self._estimate_graphs())
        return Capacity(
            num_blocks=num_blocks_for(self._config, self._geometry, self.max_model_len, measured),
            block_bytes=self._geometry.block_bytes,
            kv_cache_dtype=self._form.kv_dtype,
            vocab_size=self.spec.vocab_size,
            max_model_len=self.max_model_len,
            weight_bytes=self._decoder.weights.num_bytes,
            shared_bytes=self._decoder.weights.num_bytes if self._shares_weights else 0,
            activation_bytes=measured.activation_bytes,
            free_bytes=measured.free_bytes,
            device=_device_name(self._device),
        )

    def allocate(self, num_blocks: int) -> None:
        """Make the pool: the least capacity of the group's ranks."""
        self._store = KVStore(self._geometry, num_blocks, self._kv_dtype, self._device)
        self._table = self._empty_table(num_blocks)
        self._program = self._make_program(self._store.layers)
        if self._uses_graphs:
            self._graphs = self._make_graphs(self._store.layers)
            self._graphs.record()

    def reset(self) -> None:
        """Forget all sequences, as after `allocate`; weights and pool stay, and so does what was
        recorded over them. Waits for what the device still computes, and for the other ranks.

        Raises:
            CollectiveFailed: not all ranks had the same plans. The group must be restarted.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._communicator.start_step(0)
        self._pipes.start_step(0)
        self._communicator.all_reduce(torch.zeros(1, device=self._device))
        self._pipes.meet(torch.zeros(1, device=self._device))
        if self._table is not None:
            self._table = self._empty_table(self._table.num_blocks)
        self._tokens.reset()

    def _empty_table(self, num_blocks: int) -> SlotTable:
        return SlotTable(
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self._config.block_size,
            num_blocks=num_blocks,
        )

    def execute(self, plan: StepPlan) -> StepResult | None:
        """`begin` and `LaunchedStep.finish` at once."""
        return self.begin(plan).finish()

    def can_begin(self, plan: StepPlan) -> bool:
        """Whether `plan` may begin before the step before it has been finished."""
        return self._tokens.can_begin(plan)

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> LaunchedStep:
        """Compute one step on a CPU; on a GPU, launch it and wait for nothing.

        Raises:
            ProtocolError: the plan does not follow the last one. Nothing was computed, and the
                group must be restarted, as after any other error.
        """
        began = self._forwarded_at = time.perf_counter()
        assert self._table is not None, "allocate comes before begin"
        self._communicator.start_step(plan.step)
        self._pipes.start_step(plan.step)
        slices = self._table.apply(plan)
        self._tokens.follow(plan)
        parts = StepParts([], {})
        tokens = None
        if slices.num_tokens:
            tokens = self._compute(slices, parts)
        return LaunchedStep(
            plan,
            self._table,
            self._table.expect(slices),
            None if tokens is None else HostCopy(tokens),
            parts,
            answers=self._tokens.answers,
            began=began,
            forward_s=self._forwarded_at - began,
        )

    def close(self) -> None:
        """Leave the group and give back all memory."""
        self._graphs = self._program = None  # before what they have recorded of the communicator
        self._communicator.close()
        self._pipes.close()
        if isinstance(self._ops, CpuOperations):
            self._ops.team.close()
        self._tokens.close()
        self._decoder = self._store = self._table = None
        if self._keeper is not None:
            self._keeper.close()

    def _compute(self, slices: Slices, parts: StepParts) -> Tensor | None:
        """[R] int64 tokens of the slices that sample, if any, where they are known; the rank that
        samples adds to `parts`."""
        assert self._table is not None
        if self._pipes.after is not None:
            self._pipes.after.send(self._forward(slices, None))
            self._forwarded_at = time.perf_counter()
            return None
        assert self._decoder is not None
        history = self._table.tokens
        self._tokens.prepare(slices, history)
        sampling = slices.offsets[1:][slices.samples] - 1
        scored = self._tokens.scored_rows(slices)
        hidden = self._forward(slices, np.concatenate((sampling, scored)).astype(np.int64))
        self._forwarded_at = time.perf_counter()
        last, others = hidden[: len(sampling)], hidden[len(sampling) :][: len(scored)]
        self._tokens.score_prompts(self._decoder, slices, others, history, parts)
        if not len(sampling):
            return None
        tokens = self._tokens.sample(self._decoder, slices, last, history, parts)
        if self._pipes.before is not None:  # the others learn them with the next plan
            return tokens if self._tokens.answers else None
        tokens = self._communicator.broadcast(tokens)
        if self._last_tokens is not None:
            slots = to_device(torch.from_numpy(slices.slot[slices.samples]), self._device)
            self._last_tokens.index_copy_(0, slots.long(), tokens)
        return tokens

    def _forward(self, slices: Slices, rows: npt.NDArray[np.int64] | None) -> Tensor:
        """Hidden states of some of the step's tokens, [len(rows), hidden]; None: of all."""
        assert self._decoder is not None
        assert self._store is not None
        assert self._table is not None
        batch = self._on_device(self._table.inputs(slices), slices)
        if self._pipes.before is not None:
            assert self._incoming is not None
            self._pipes.before.receive(self._incoming[: batch.num_tokens])
            if self._graphs is not None:  # rows of padding would add up from step to step
                self._incoming[batch.num_tokens :].zero_()
        wanted = None if rows is None else torch.from_numpy(rows)
        if self._program is not None:
            return self._program.run(batch, wanted)
        is_every_token = rows is None or len(rows) == batch.num_tokens == len(slices.slot)
        if is_every_token and self._graphs is not None:
            hidden = self._graphs.run(batch)
            if hidden is not None:
                return hidden
        index = None
        if wanted is not None and not is_every_token:
            index = to_device(wanted, self._device)
        return self._launch(batch, self._store.layers, index)

    def _on_device(self, batch: BatchInputs, slices: Slices) -> BatchInputs:
        """With the tokens that the device sampled last where the host has not read them yet."""
        if self._last_tokens is None:
            return batch
        moved = batch_on_device(batch, self._device)
        last = slices.offsets[1:] - 1
        is_late = batch.token_ids.numpy()[last] == ON_ITS_WAY
        if is_late.any():
            rows = to_device(torch.from_numpy(last[is_late]).long(), self._device)
            slots = to_device(torch.from_numpy(slices.slot[is_late]).long(), self._device)
            moved.token_ids.index_copy_(0, rows, self._last_tokens.index_select(0, slots))
        return moved

    def _launch(self, batch: BatchInputs, layers: Sequence[Tensor], rows: Tensor | None) -> Tensor:
        assert self._decoder is not None
        self._ops.begin_step(batch, self._decoder.shape, self._config.block_size)
        incoming = None if self._incoming is None else self._incoming[: batch.num_tokens]
        return self._decoder.forward(batch, layers, rows, incoming)

    @property
    def _runs_ahead(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _uses_graphs(self) -> bool:
        can_be_recorded = self._device.type == "cuda" and self._ops.name == "cuda"
        return can_be_recorded and not self._config.enforce_eager

    def _make_program(self, layers: Sequence[Tensor]) -> StepProgram | None:
        if not isinstance(self._ops, CpuOperations):
            return None
        return StepProgram(
            self._ops,
            lambda batch, rows: self._launch(batch, layers, rows),
            max_tokens=self._config.max_num_batched_tokens,
            block_size=self._config.block_size,
        )

    def _make_graphs(self, layers: Sequence[Tensor]) -> DecodeGraphs:
        return DecodeGraphs(
            lambda batch: self._launch(batch, layers, None),
            sizes=graph_sizes(min(self._config.max_num_seqs, self._config.max_num_batched_tokens)),
            max_context_len=self.max_model_len,
            max_blocks=blocks_for(self.max_model_len, self._config.block_size),
            device=self._device,
            capture=CudaCapture(self._device),
        )

    def _estimate_graphs(self) -> int:
        """Over a pool of one block: padded rows, the only ones while recording, touch none."""
        store = KVStore(self._geometry, 1, self._kv_dtype, self._device)
        return self._make_graphs(store.layers).estimate()

    def _known_bytes(self) -> int:
        """The least that a step takes: what a CPU's own operations have buffers for."""
        if self._ops.name != "cpu":
            return 0
        config = self._config
        return activation_bytes(
            self.spec,
            self._shard,
            self._stage,
            self._form,
            max_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
        )

    def _profile(self) -> None:
        """The largest step, through two layers: others use the same memory again, and the last
        one computes only the rows that are sampled."""
        with torch.inference_mode():
            self._run_largest_step()
        trim_heap()

    def _run_largest_step(self) -> None:
        assert self._decoder is not None
        config = self._config
        num_slices = min(config.max_num_seqs, config.max_num_batched_tokens)
        longest = min(config.max_num_batched_tokens - num_slices + 1, self.max_model_len)
        batch = largest_batch(longest, num_slices, config.block_size, self.max_model_len)
        batch = batch_on_device(batch, self._device)
        num_blocks = blocks_for(longest, config.block_size)
        one_layer = replace(self._geometry, num_layers=1)
        (kv,) = KVStore(one_layer, num_blocks, self._kv_dtype, self._device).layers
        layers = [kv] * min(2, self._stage.layers.size)
        rows = batch.slice_offsets[1:].to(torch.int64) - 1
        program = self._make_program(layers)
        hidden = program.run(batch, rows) if program else self._launch(batch, layers, rows)
        if not self._stage.is_last:
            return
        sampled = hidden[: self._tokens.sampled_at_once(len(hidden))]
        logits = self._tokens.logits(self._decoder, sampled)
        if logits is None:
            return
        draw = find_draw(self._ops)
        if draw is None or self._device.type != "cpu":
            torch.softmax(logits, dim=-1).cumsum(dim=-1, dtype=torch.float64)
        if draw is not None:  # compiled now, not while the first request waits
            whole = torch.ones(len(logits), dtype=torch.int64, device=self._device)
            share = whole.double()
            draw(logits, share.float(), whole, share, share, whole, whole)


def choose_dtype(wanted: str, checkpoint: str) -> torch.dtype:
    """The type of weights; `auto` is the checkpoint's."""
    chosen = checkpoint if wanted == "auto" else wanted
    known = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    return known[chosen]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
