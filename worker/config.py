"""What one rank of a worker group is told when it starts."""

from dataclasses import dataclass
from pathlib import Path

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "int8")
DEVICES = ("cpu", "cuda")
QUANTIZATIONS = ("none", "int8")
OPERATION_SETS = ("auto", "reference", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Everything a `ModelRunner` needs to know; it reads no environment.

    Raises:
        ValueError: a field is out of its range.
    """

    model_dir: Path
    """Folder with config.json and safetensors files."""
    dtype: str = "auto"
    """Of weights, and on a GPU of activations, which on a CPU are float32. auto: the
    checkpoint's own."""
    kv_cache_dtype: str = "auto"
    """How K/V are held; auto: as `dtype` says. Narrower: more tokens fit, and long contexts are
    read faster, at the price of rounding."""
    quantization: str = "none"
    """Of the weights of linear layers, done while loading. int8: a byte per weight and a scale for
    each 32; half of 16-bit weights' traffic, at the price of some accuracy. CPUs only."""
    device: str = "cpu"
    """cpu or cuda; which GPU is the process's choice (the current CUDA device)."""
    ops: str = "auto"
    """Which set of operations; auto: the device's fast one."""
    tensor_parallel_size: int = 1
    """Ranks of each stage."""
    pipeline_parallel_size: int = 1
    """Stages."""
    rank: int = 0
    """Of the group, stage after stage."""
    ranks_on_host: int = 1
    """Ranks, of all groups, that share this host's memory; each takes its part of it (CPU)."""
    block_size: int = 16
    """Tokens per KV block. More: fewer table entries, more unused room and coarser prefixes."""
    max_num_seqs: int = 256
    """Slots. More: throughput, at the price of activations and logits for each."""
    max_num_batched_tokens: int = 2048
    """Most tokens of a step. More: prompts start sooner, at the price of activation memory."""
    max_model_len: int | None = None
    """Most tokens of a sequence. None: what the model's config says."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory (CPU: of the memory that is free) that may be used."""
    kv_cache_memory_bytes: int | None = None
    """KV memory per rank, instead of what `gpu_memory_utilization` leaves."""
    num_kv_blocks: int | None = None
    """Number of KV blocks, taken as said, instead of either."""
    enforce_eager: bool = False
    """Launch every kernel of a decode step instead of replaying a CUDA graph. True: a faster
    start and some memory, at the price of slower decodes; without effect on a CPU."""
    num_threads: int = 1
    """CPU threads for computing. More than the cores this rank has make it slower."""

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def rank_in_stage(self) -> int:
        return self.rank % self.tensor_parallel_size

    def __post_init__(self) -> None:
        for name, known in (
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("quantization", QUANTIZATIONS),
            ("device", DEVICES),
            ("ops", OPERATION_SETS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "ranks_on_host")
        for name in (
            *sizes,
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_threads",
        ):
            _check_positive(name, getattr(self, name))
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_kv_blocks"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        num_ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        if not 0 <= self.rank < num_ranks:
            raise ValueError(
                f"rank must be from 0 to {num_ranks - 1} "
                f"(tensor_parallel_size={self.tensor_parallel_size}, "
                f"pipeline_parallel_size={self.pipeline_parallel_size}), got {self.rank}"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(
                "gpu_memory_utilization must be above 0 and at most 1, "
                f"got {self.gpu_memory_utilization:g}"
            )
        if self.ops == "cuda" and self.device != "cuda":
            raise ValueError(f"ops='cuda' needs device='cuda', got device={self.device!r}")
        if self.quantization != "none" and (self.device != "cpu" or self.ops == "reference"):
            raise ValueError(
                f"quantization={self.quantization!r} needs device='cpu' and ops='cpu' (or 'auto'), "
                f"got device={self.device!r} and ops={self.ops!r}. Set quantization='none'; "
                "dtype='bfloat16' halves the weights of a float32 checkpoint anywhere."
            )


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
