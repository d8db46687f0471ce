"""How the engine is and what it does, for clients that ask or watch."""

from msgspec import Struct

from scheduler.arrays import NO_FLOAT32, NO_INT32, Float32Array, Int32Array


class StatusRequest(Struct, frozen=True, tag_field="type", tag="status_request"):
    """How are you? Answered by `Status`, also before `ServerInfo`."""


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
