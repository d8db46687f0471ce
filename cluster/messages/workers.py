"""What a worker and the engine tell each other besides plans and results."""

from msgspec import Struct

from cluster.loss_reasons import LossReason


class RankCapacity(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank measured after loading its share of the model."""

    num_blocks: int
    """KV blocks that it could hold."""
    block_bytes: int
    vocab_size: int
    max_model_len: int
    weight_bytes: int = 0
    shared_bytes: int = 0
    """Of `weight_bytes`, what ranks of other groups on this host have in the same memory"""
    activation_bytes: int = 0
    free_bytes: int = 0
    device: str = ""
    kv_cache_dtype: str = ""
    """How K/V are held: float32, bfloat16, float16 or int8"""


class NodeFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What must be alike on all nodes of a group."""

    node: str
    """The host's name"""
    python: str = ""
    ray: str = ""
    torch: str = ""
    stoker: str = ""
    model_digest: str = ""
    model_problem: str = ""
    """Why there is no digest"""


class Introduction(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a worker begins a connection: which engine it looks for, and which rank it is."""

    protocol: int
    engine_id: str
    key: str
    """The secret of this engine, from the launch spec; strangers do not have it."""
    group: int
    epoch: int
    rank: int


class WorkerGreeting(
    Introduction, frozen=True, kw_only=True, tag_field="type", tag="worker_greeting"
):
    """The first message of a worker, before it loads anything."""

    facts: NodeFacts


class WorkerLease(Introduction, frozen=True, kw_only=True, tag_field="type", tag="worker_lease"):
    """First and only message of a worker's second connection, on which it can be told to end while
    it computes. The end of the connection means nothing."""


class MayLoad(Struct, frozen=True, tag_field="type", tag="may_load"):
    """All ranks of the group have greeted, and are alike."""


class RankPhase(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="rank_phase"
):
    """How far the start of a rank is; from a worker to the engine, and on to the supervisor."""

    group: int
    epoch: int
    rank: int
    node: str = ""
    phase: str
    """`meet` (the other ranks), `wait` (until all may load), `load` (weights), `profile` (the
    largest step), `allocate` (K/V)"""
    done: int = 0
    """Bytes of the checkpoint that it has been through"""
    total: int = 0


class WorkerHello(Introduction, frozen=True, kw_only=True, tag_field="type", tag="worker_hello"):
    """A worker has its weights."""

    capacity: RankCapacity
    host: str = ""
    pid: int = 0
    start_s: dict[str, float] = {}
    """Seconds that it took by `cluster.start_phases.RANK_PHASES`"""
    is_loaded: bool = False
    """It had them already: the engine that it served before was lost"""


class PoolSize(Struct, frozen=True, tag_field="type", tag="pool_size"):
    """The least capacity of the group's ranks, which each rank now allocates."""

    num_blocks: int


class WorkerReady(Struct, frozen=True, tag_field="type", tag="worker_ready"):
    """The pool is allocated; plans may come."""


class WorkerFailed(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="worker_failed"
):
    """A rank cannot go on: said by the worker itself, or by the supervisor if it died."""

    group: int
    epoch: int
    rank: int
    message: str
    key: str = ""
    """As in `WorkerHello`, which has not been said when loading fails."""
    step: int = 0
    """The step it was computing; 0: none."""
    reason: LossReason = "died"


class Stop(Struct, frozen=True, tag_field="type", tag="stop"):
    """End yourself in order."""

    message: str = ""
