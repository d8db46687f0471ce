"""What the processes tell each other besides plans, results, requests and tokens.

Each socket has one union of message types per direction (at the end of this file); `cluster.wire`
turns them into bytes. Every message is a MessagePack map whose `type` entry names it.
Durations are seconds, sizes bytes, lengths tokens; no timestamps, since clocks differ.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.loss_reasons import LossReason
from scheduler.arrays import NO_FLOAT32, NO_INT32, Float32Array, Int32Array
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Abort, Rejection, Request, TokenBatch

# --- front socket: clients ------------------------------------------------------------------


class ClientHello(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="client_hello"
):
    """The first message of a client, answered by `ServerInfo` once the engine is ready.

    Until then the answer is `EngineStarting`, and `ServerInfo` follows by itself.
    """

    protocol: int
    """`cluster.wire.PROTOCOL_VERSION` of the client."""
    label: str = ""
    """For the engine's log; need not be unique."""


class GenerationDefaults(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the model's generation_config.json says where a request says nothing.

    None: the file says nothing, so `SamplingParams`' own default holds.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


class ServerInfo(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="server_info"
):
    """What a client must know to build requests; sent when a token can be made."""

    protocol: int
    engine_id: str
    """Changes when the engine restarts, after which old handles mean nothing."""
    model: str
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    """Token ids are 0 to this minus one."""
    block_size: int
    """Tokens per KV block; cached prefixes are whole blocks."""
    max_num_seqs: int
    """Requests that run at once in one group."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end an output unless `ignore_eos`; to be put into `Request.end_ids`."""
    tokenizer_digest: str = ""
    """`TokenizerFiles.digest` of what `TokenizerRequest` would bring; empty: it has none."""
    defaults: GenerationDefaults = GenerationDefaults()


class EngineStarting(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="engine_starting"
):
    """Not ready yet; `ServerInfo` follows when it is. Requests are refused meanwhile."""

    message: str


class EngineStopping(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="engine_stopping"
):
    """Sent to each client when the engine stops taking requests.

    Running requests go on for at most `drain_s`; what then still runs ends with an abort.
    """

    message: str
    drain_s: float = 0.0
    hands_over: bool = False
    """The connection ends now, and no request does: the next engine at this address goes on with
    what is submitted to it again."""


class Refusal(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="refusal"
):
    """The engine cannot talk to this peer, or could not read what it sent."""

    reason: str
    """One of: protocol (versions differ), unreadable (not one of our messages), no_hello
    (spoke before its hello), too_slow (was cut off), no_tokenizer, stranger (a worker that is
    not, or no longer, one of ours)."""
    message: str


class TokenizerRequest(Struct, frozen=True, tag_field="type", tag="tokenizer_request"):
    """Send me the tokenizer's files; answered by `TokenizerFiles`."""


class StatusRequest(Struct, frozen=True, tag_field="type", tag="status_request"):
    """How are you? Answered by `Status`, also before `ServerInfo`."""


class CancelByLabel(Struct, frozen=True, tag_field="type", tag="cancel_by_label"):
    """End the live requests with this label, whosever they are. Answered by `Cancelled`.

    A label may be several names with a space between them, of which one must be this. Behind
    the last one `-` and a number below 1000 may stand: so the outputs of one call are told
    apart.
    Whoever submitted them is told that they ended with an abort.
    """

    label: str


class Cancelled(Struct, frozen=True, tag_field="type", tag="cancelled"):
    """Answer to `CancelByLabel`."""

    label: str
    count: int
    """Requests that were live, and are not any more."""


class ScaleGroups(Struct, frozen=True, tag_field="type", tag="scale_groups"):
    """Have so many worker groups from now on. Answered by `Scaled`."""

    num_groups: int | None
    """None: as many as load asks for, between `min_groups` and `max_groups`."""


class Scaled(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="scaled"):
    """Answer to `ScaleGroups`: what the engine aims at now. Groups start and leave meanwhile."""

    num_groups: int
    """That are wanted"""
    is_automatic: bool = False
    """Whether load decides"""
    refusal: str = ""
    """Why nothing was changed; empty: it was."""


FaultKind: TypeAlias = Literal[
    "kill", "stop", "raise", "slow", "drop", "miss", "delay", "cut", "full"
]
"""What `Fault.kind` may say."""


class Fault(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="fault"):
    """Something that goes wrong on purpose, in a cluster that allows it (`allow_chaos`).

    `kill` and `stop` end or stop the process by a signal; `raise` is an exception in a step, `slow`
    a step that takes longer; `drop` loses answers on their way to the engine, `delay` holds them
    up, `miss` loses plans on their way to a rank; `cut` ends the connection; `full` takes all idle
    KV blocks of a group.
    """

    kind: FaultKind
    step: int = 0
    """When this step of the group begins, or a later one if it has begun; 0: at once. Of kill,
    stop, raise and slow."""
    after_s: float = 0.0
    """So long after that, of kill and stop: also in the middle of a step."""
    seconds: float = 0.0
    """How long it lasts: stop, slow, delay (of each step or answer), full"""
    count: int = 1
    """Steps, answers or plans that it befalls: slow, drop, miss, delay"""


class InjectFault(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="inject_fault"
):
    """Let a fault happen. Answered by `FaultInjected`, unless the engine is what ends."""

    fault: Fault
    group: int = -1
    """-1: all groups, of which those ranks are meant that are on `node`; without a node, the
    engine itself"""
    rank: int = -1
    """-1: all ranks of the group"""
    node: str = ""
    """Only ranks on this node; empty: on any"""


class FaultInjected(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="fault_injected"
):
    """Answer to `InjectFault`."""

    ranks: tuple[tuple[int, int], ...] = ()
    """Group and rank of each that was told"""
    refusal: str = ""
    """Why nothing was done; empty: it was."""


class DrainNode(Struct, frozen=True, tag_field="type", tag="drain_node"):
    """Take every worker group off this node at once, and start none there. Answered by
    `NodeDrained`; sent again, it says how far that is."""

    node: str
    """Its host name as `RankStatus.host` has it, or the address by which Ray knows it"""
    undo: bool = False
    """Groups may start there again."""


class NodeDrained(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="node_drained"
):
    """Answer to `DrainNode`."""

    nodes: tuple[str, ...] = ()
    """That take no groups now"""
    num_leaving: int = 0
    """Groups that have processes on the node still"""
    waits_for: str = ""
    """What has to be before the groups can leave; empty: nothing."""
    refusal: str = ""
    """Why nothing was changed; empty: it was."""


class ReloadModel(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="reload_model"
):
    """Let one worker group after the other come back with other weights. Answered by
    `ModelReloaded`."""

    model: str = ""
    """A folder on the engine's host, or a name in its models directory; empty: what is in the
    same folder now"""
    only_asks: bool = False
    """Begin nothing: how far is it?"""


class ModelReloaded(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="model_reloaded"
):
    """Answer to `ReloadModel`: how far the one is that runs, or ran last."""

    model_dir: str = ""
    """Whose weights groups load that start now"""
    is_running: bool = False
    num_groups: int = 0
    num_done: int = 0
    """Groups that are back"""
    failure: str = ""
    """Why it was given up; the groups go back, or have gone back, to the old weights."""
    refusal: str = ""
    """Why nothing was begun; empty: it was."""


class UpgradeCluster(Struct, frozen=True, tag_field="type", tag="upgrade_cluster"):
    """Replace every process of the cluster but the supervisor's by one that runs the code that is
    installed now. Answered by `ClusterUpgraded`."""

    only_asks: bool = False
    """Begin nothing: how far is it?"""


class ClusterUpgraded(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="cluster_upgraded"
):
    """Answer to `UpgradeCluster`, as the supervisor has told the engine last."""

    phase: str
    """idle, prepare (a new engine loads its code), hand_over, take_over (it takes the groups over),
    renew (they come back one by one) or servers (so do the API servers)"""
    failure: str = ""
    """Why the last one was given up; what had been replaced by then stays."""
    num_done: int = 0
    """Upgrades that have come to their end, whatever it was"""
    refusal: str = ""
    """Why nothing was begun; empty: it was."""


Change: TypeAlias = ScaleGroups | DrainNode | ReloadModel
"""What clients may want changed of the worker groups."""

Changed: TypeAlias = Scaled | NodeDrained | ModelReloaded
"""What they are answered."""


class RankStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker process."""

    rank: int
    state: str
    """starting, loaded or ready"""
    stage: int = 0
    """Of the pipeline; from 0"""
    host: str = ""
    pid: int = 0
    device: str = ""
    num_blocks: int = 0
    """KV blocks that this rank could hold; the group uses the least of its ranks."""
    weight_bytes: int = 0


class GroupStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker group."""

    group: int
    epoch: int
    state: str
    """starting, sizing, ready, lost, waiting (to be restarted), stopped, draining (starts nothing
    new), retiring (its processes end) or retired"""
    ranks: tuple[RankStatus, ...] = ()
    num_running: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Held by running sequences."""
    num_cached_blocks: int = 0
    """Of a prefix that can be reused, whether held or idle."""
    num_steps: int = 0
    """Since this epoch began."""
    steps_per_s: float = 0.0
    """Over the last ten seconds or so; 0 when idle."""
    message: str = ""
    """Why it was lost last; empty: it never was."""
    num_restarts: int = 0
    """In all"""


class Totals(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters since the engine began, over all groups; they never fall."""

    num_requests: int = 0
    num_rejected: int = 0
    finished: dict[str, int] = {}
    """Requests that ended, by `Finish` name in lower case: stop, length, abort, …"""
    prompt_tokens: int = 0
    """Of requests that were accepted."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache instead of computed."""
    output_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed, those computed again after a preemption included."""
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again after a preemption or a lost group."""
    num_steps: int = 0
    num_mixed_steps: int = 0
    """Steps with both a prefill chunk and a decode."""
    num_preemptions: int = 0
    peak_used_blocks: int = 0
    """Most blocks of one group that were held at once."""
    num_dropped: int = 0
    """Messages that were unreadable, too large, or from strangers."""
    num_turned_away: int = 0
    """Connections that ended without a message: without the keys of an encrypted socket, not of
    ZeroMQ, or silent."""
    num_cut_clients: int = 0
    """Clients cut off because they vanished or read too slowly."""


class Status(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="status"):
    """Answer to `StatusRequest`."""

    engine_id: str
    model: str
    state: str
    """starting, serving, recovering (no worker group serves, but one may come back), stopping or
    failed (no worker group is left)"""
    uptime_s: float
    num_clients: int = 0
    num_running: int = 0
    num_waiting: int = 0
    groups: tuple[GroupStatus, ...] = ()
    drained_nodes: tuple[str, ...] = ()
    """On which no groups start"""
    totals: Totals = Totals()
    num_engine_restarts: int = 0
    """Engine processes that ended unasked or hung; figures begin anew with each process"""
    last_engine_loss: str = ""
    """How the one before ended"""


class MetricsRequest(Struct, frozen=True, tag_field="type", tag="metrics_request"):
    """Give me your counts. Answered by `EngineMetrics`, also before `ServerInfo`."""


class Sample(Struct, frozen=True):
    """One series of a metric with one value."""

    labels: tuple[str, ...]
    """Values of the metric's labels, in the order that docs/metrics.md has them."""
    value: float


class Distribution(Struct, frozen=True):
    """One series of a histogram."""

    labels: tuple[str, ...]
    counts: tuple[int, ...]
    """By bucket, not summed up; the last one is of values above all bounds."""
    sum: float


class EngineMetrics(Struct, frozen=True, kw_only=True, tag_field="type", tag="engine_metrics"):
    """Answer to `MetricsRequest`: the metrics of docs/metrics.md, by name without prefix."""

    model: str
    values: dict[str, tuple[Sample, ...]]
    """Gauges and counters"""
    distributions: dict[str, tuple[Distribution, ...]]
    """Histograms"""


class WatchSteps(Struct, frozen=True, tag_field="type", tag="watch_steps"):
    """Tell me of each step from now on (`StepNews`), or no more."""

    enabled: bool


class GroupLoad(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker group at this moment."""

    group: int
    num_running: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Held by sequences."""
    num_cached_blocks: int = 0
    """Of a prefix that can be reused, whether held or idle."""


class StepNews(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="step_news"
):
    """How things are, and the steps answered since the last news: R rows, as columns.

    Sent to those who said `WatchSteps`, at most about ten times a second and only when
    something changed. A row's figures are those of when its plan went out.
    """

    uptime_s: float
    """Of the engine, when this was sent."""
    num_waiting: int = 0
    groups: tuple[GroupLoad, ...] = ()
    group: Int32Array = NO_INT32
    """[R] whose step"""
    step: Int32Array = NO_INT32
    """[R] its number in the group's epoch"""
    age_s: Float32Array = NO_FLOAT32
    """[R] seconds from its answer to this message"""
    compute_s: Float32Array = NO_FLOAT32
    """[R] seconds that it took the worker"""
    prefill_tokens: Int32Array = NO_INT32
    """[R] tokens of prompts that it computed, those computed again included"""
    decode_tokens: Int32Array = NO_INT32
    """[R] running sequences that went one token further"""
    cached_tokens: Int32Array = NO_INT32
    """[R] tokens that sequences which started with it found in the prefix cache"""
    new_tokens: Int32Array = NO_INT32
    """[R] tokens that it brought"""
    preempted: Int32Array = NO_INT32
    """[R] sequences of any group that lost their blocks since the row before"""
    running: Int32Array = NO_INT32
    """[R] in its group"""
    waiting: Int32Array = NO_INT32
    """[R] of all groups"""
    used_blocks: Int32Array = NO_INT32
    """[R] of its group, as in `GroupLoad`"""
    cached_blocks: Int32Array = NO_INT32
    """[R] of its group, as in `GroupLoad`"""
    first_token_s: Float32Array = NO_FLOAT32
    """Seconds from arrival to the first token, of each request that got it since the last news"""


# --- back socket: workers -------------------------------------------------------------------


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


class WorkerGreeting(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="worker_greeting"
):
    """The first message of a worker, before it loads anything."""

    protocol: int
    engine_id: str
    key: str
    """The secret of this engine, from the launch spec; strangers do not have it."""
    group: int
    epoch: int
    rank: int
    facts: NodeFacts


class WorkerLease(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="worker_lease"
):
    """First and only message of a worker's second connection, on which it can be told to end while
    it computes. The end of the connection means nothing."""

    protocol: int
    engine_id: str
    key: str
    """The secret of this engine, from the launch spec; strangers do not have it."""
    group: int
    epoch: int
    rank: int


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


class WorkerHello(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="worker_hello"
):
    """A worker has its weights."""

    protocol: int
    engine_id: str
    key: str
    """The secret of this engine, from the launch spec; strangers do not have it."""
    group: int
    epoch: int
    rank: int
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


# --- back socket: the supervisor ------------------------------------------------------------


class Ping(Struct, frozen=True, tag_field="type", tag="ping"):
    """Supervisor to engine: does your loop turn? Answered by `Pong`."""


class Pong(Struct, frozen=True, tag_field="type", tag="pong"):
    """Answer to `Ping`."""


class SupervisorHello(Struct, frozen=True, kw_only=True, tag_field="type", tag="supervisor_hello"):
    """The first message of the supervisor, which starts and ends processes for the engine."""

    protocol: int
    engine_id: str
    key: str


class AvoidNodes(Struct, frozen=True, tag_field="type", tag="avoid_nodes"):
    """Engine to supervisor: place no ranks on these nodes from now on."""

    nodes: tuple[str, ...]
    """By host name or address"""


class UseModel(Struct, frozen=True, tag_field="type", tag="use_model"):
    """Engine to supervisor: groups that are started from now on load this checkpoint."""

    model_dir: str


class StartGroup(Struct, frozen=True, tag_field="type", tag="start_group"):
    """Engine to supervisor: start the ranks of this group under this epoch."""

    group: int
    epoch: int


class GroupReady(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="group_ready"
):
    """Engine to supervisor: the group takes plans."""

    group: int
    epoch: int
    num_blocks: int
    start_s: dict[str, float] = {}
    """Of the rank that was loaded last, as in its `WorkerHello`"""


class GroupLost(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="group_lost"
):
    """Engine to supervisor: end what is left of this epoch, then say `GroupStopped`."""

    group: int
    epoch: int
    message: str
    rank: int = -1
    """Whose fault it was; -1: the group's."""
    step: int = 0
    restarts: bool = False
    """Whether a `StartGroup` follows."""


class RetireGroup(Struct, frozen=True, tag_field="type", tag="retire_group"):
    """Engine to supervisor: this group is not needed; end its processes, then say
    `GroupStopped`."""

    group: int
    epoch: int
    comes_back: bool = False
    """Whether a `StartGroup` follows that."""


class GroupStopped(Struct, frozen=True, tag_field="type", tag="group_stopped"):
    """Supervisor to engine: no process of this epoch is left."""

    group: int
    epoch: int


class BeginUpgrade(Struct, frozen=True, tag_field="type", tag="begin_upgrade"):
    """Engine to supervisor: a client asks for an upgrade."""


class UpgradeNews(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="upgrade_news"
):
    """Supervisor to engine: how far an upgrade is; fields as in `ClusterUpgraded`."""

    phase: str
    failure: str = ""
    num_done: int = 0


class HandOver(Struct, frozen=True, tag_field="type", tag="hand_over"):
    """Supervisor to engine: end now, and end no request and no worker; another engine follows."""


class RenewGroups(Struct, frozen=True, tag_field="type", tag="renew_groups"):
    """Supervisor to engine: let one group after the other leave and come back."""


class GroupsRenewed(Struct, frozen=True, tag_field="type", tag="groups_renewed"):
    """Engine to supervisor: all groups have come back since `RenewGroups`."""

    failure: str = ""
    """Or one could not, and why."""


class StartPhases(Struct, frozen=True, tag_field="type", tag="start_phases"):
    """Supervisor to engine: everything is up, and this is where the time went."""

    seconds: dict[str, float]
    """By phase, in their order (`cluster.start_phases`)"""


class Shutdown(Struct, frozen=True, kw_only=True, tag_field="type", tag="shutdown"):
    """Supervisor to engine: take no more requests, finish the running ones, end.

    Sent again with a smaller `drain_s`, it shortens the wait.
    """

    drain_s: float
    """Seconds that running requests may still take."""
    message: str = "the engine was asked to stop"


FromClient: TypeAlias = (
    ClientHello
    | TokenizerRequest
    | Request
    | Abort
    | StatusRequest
    | CancelByLabel
    | ScaleGroups
    | DrainNode
    | ReloadModel
    | UpgradeCluster
    | MetricsRequest
    | WatchSteps
    | InjectFault
)
ToClient: TypeAlias = (
    ServerInfo
    | EngineStarting
    | EngineStopping
    | Refusal
    | TokenizerFiles
    | TokenBatch
    | Rejection
    | Status
    | Cancelled
    | Scaled
    | NodeDrained
    | ModelReloaded
    | ClusterUpgraded
    | EngineMetrics
    | StepNews
    | FaultInjected
)
ToEngine: TypeAlias = (
    WorkerGreeting
    | RankPhase
    | WorkerHello
    | WorkerReady
    | WorkerLease
    | WorkerFailed
    | StepResult
    | SupervisorHello
    | GroupStopped
    | StartPhases
    | UpgradeNews
    | HandOver
    | RenewGroups
    | Ping
    | Shutdown
)
FromEngine: TypeAlias = (
    MayLoad
    | PoolSize
    | StepPlan
    | Fault
    | Stop
    | Refusal
    | BeginUpgrade
    | GroupsRenewed
    | AvoidNodes
    | UseModel
    | StartGroup
    | RankPhase
    | GroupReady
    | GroupLost
    | RetireGroup
    | Pong
)
