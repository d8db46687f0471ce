"""Every metric: its name, kind, labels, buckets and meaning, in one place.

The engine core counts what it knows and answers `MetricsRequest` with plain numbers by these
names (`cluster.engine_metrics`); an API server adds what it knows itself and puts it into
Prometheus' words (`cluster.api.metrics_text`). Names are an interface: dashboards and routers
read them, so a name is never changed, only added (cases: a renamed metric blanks dashboards).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from scheduler.meter import GAP_S, LATENCY_S, PHASE_S, TOKENS

Kind: TypeAlias = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric, with as many series as its labels have values."""

    name: str
    """After `stoker:`; a counter's ends in `_total` when it is shown."""
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""
    vllm: str = ""
    """The same after `vllm:`, where that server has it; with its labels `model_name` and
    `engine` before our own."""
    vllm_labels: tuple[str, ...] | None = None
    """Where they are named otherwise than ours."""


def _gauge(name: str, text: str, *labels: str, vllm: str = "") -> Family:
    """This and the next two: fields as of `Family`."""
    return Family(name=name, kind="gauge", text=text, labels=labels, vllm=vllm)


def _counter(
    name: str,
    text: str,
    *labels: str,
    vllm: str = "",
    vllm_labels: tuple[str, ...] | None = None,
) -> Family:
    return Family(
        name=name, kind="counter", text=text, labels=labels, vllm=vllm, vllm_labels=vllm_labels
    )


def _histogram(
    name: str, bounds: tuple[float, ...], text: str, *labels: str, vllm: str = ""
) -> Family:
    return Family(name=name, kind="histogram", text=text, labels=labels, bounds=bounds, vllm=vllm)


ENGINE: Sequence[Family] = (
    _gauge(
        "engine_up",
        "1 if the engine core answered this scrape; without it, most others are missing.",
    ),
    _gauge(
        "engine_info", "1, with what is served as labels.", "model", "engine_id", "version", "state"
    ),
    _gauge("engine_uptime_seconds", "Since the engine core began."),
    _gauge(
        "start_seconds",
        "Where the time from launch to readiness went, by phases that follow one another: `plan` "
        "until the parts are being started, `backend` until Ray (if used) is up, `place` until "
        "the ranks' processes are started (with `backend=local`, on CPUs, their code is loaded by "
        "then); then of the rank that was last `import` (its code), "
        "`load` (weights) or `map` (weights that its host had kept), `profile` (the largest step "
        "once); `allocate` until all ranks have their K/V; `serve` until requests are taken on "
        "every way.",
        "phase",
    ),
    _gauge(
        "requests_running",
        "Sequences that hold blocks, of all groups.",
        vllm="num_requests_running",
    ),
    _gauge(
        "requests_waiting",
        "Sequences in the queue, preempted ones included.",
        vllm="num_requests_waiting",
    ),
    _gauge(
        "waiting_prompt_tokens",
        "Tokens that must be computed or found in a cache before all that wait could go on.",
    ),
    _gauge(
        "requests_promised", "Refused requests that were told when to come back, and have not yet."
    ),
    _gauge("clients", "Connections to the engine's front socket."),
    _gauge("groups_ready", "Worker groups that take plans."),
    _gauge("group_epoch", "Starts of a worker group; 1 if it was never lost.", "group"),
    _gauge("group_requests_running", "Sequences that hold blocks in a group.", "group"),
    _gauge("kv_blocks", "Blocks of a group's KV pool.", "group"),
    _gauge("kv_blocks_used", "Blocks that running sequences hold.", "group"),
    _gauge("kv_blocks_cached", "Blocks with a prefix that can be reused, held or idle.", "group"),
    _gauge(
        "kv_cache_usage_ratio",
        "Share of all groups' blocks that running sequences hold, from 0 to 1.",
        vllm="kv_cache_usage_perc",
    ),
    _counter(
        "engine_restarts",
        "Engine processes that ended unasked, or hung, and were followed by another; an upgrade's "
        "are not counted. The other counters of the engine begin anew with each, and with an "
        "upgrade.",
    ),
    _counter("requests_accepted", "Requests that entered the queue."),
    _counter(
        "requests_continued",
        "Of the accepted: requests that had been begun on an engine or connection that is gone.",
    ),
    _counter(
        "requests_finished",
        "Requests that ended, by why.",
        "reason",
        vllm="request_success",
        vllm_labels=("finished_reason",),
    ),
    _counter("requests_refused", "Requests that the engine did not take, by why.", "reason"),
    _counter("prompt_tokens", "Of requests that were accepted.", vllm="prompt_tokens"),
    _counter("generation_tokens", "Tokens that clients were sent.", vllm="generation_tokens"),
    _counter(
        "tokens",
        "Tokens by what it took: `prefill` were computed as part of a prompt, those that were "
        "`recomputed` after a preemption or a lost group included; `decode` one by one; `cached` "
        "were found in the prefix cache when their request started.",
        "kind",
    ),
    _counter(
        "prefix_cache_queried_tokens",
        "Prompt tokens that were looked for in the prefix cache.",
        vllm="prefix_cache_queries",
    ),
    _counter("prefix_cache_hit_tokens", "Of these, found.", vllm="prefix_cache_hits"),
    _counter(
        "requests_poisoned",
        "Requests given up because worker groups failed whenever they were computed.",
    ),
    _counter(
        "group_restarts",
        "Starts of worker groups after a loss, by why they were lost: `died` (a process of it "
        "died), `raised` (a rank raised an error), `hung` (a step was not answered in time), "
        "`wrong` (a rank answered what it was not asked), `cut` (a connection ended), `node` (its "
        "node was lost), `ended` (somebody ended a process of it), `start` (it was not ready "
        "yet).",
        "reason",
    ),
    _counter("dropped_tokens", "Tokens sampled for requests that had ended meanwhile."),
    _counter(
        "preemptions", "Running sequences that had to give up their blocks.", vllm="num_preemptions"
    ),
    _counter("steps", "Steps planned; `mixed` hold parts of prompts and running sequences.", "mix"),
    _counter("stale_results", "Results of a worker group's earlier life, which were dropped."),
    _counter(
        "messages_dropped",
        "Messages to the engine that were unreadable, too large, or from strangers.",
    ),
    _counter(
        "connections_turned_away",
        "Connections to the engine that ended without a message: without the keys of an encrypted "
        "socket, not of ZeroMQ, or silent.",
    ),
    _counter("clients_cut_off", "Clients that vanished or read too slowly."),
    _counter(
        "metric_errors", "Measurements that failed or were impossible, such as a negative time."
    ),
    _histogram(
        "time_to_first_token_seconds",
        LATENCY_S,
        "From a request's arrival at the engine to its first token.",
        vllm="time_to_first_token_seconds",
    ),
    _histogram(
        "inter_token_seconds",
        GAP_S,
        "From each token of a sequence to its next one.",
        vllm="inter_token_latency_seconds",
    ),
    _histogram(
        "request_seconds",
        LATENCY_S,
        "From arrival to the last token, of requests that ended by themselves.",
        vllm="e2e_request_latency_seconds",
    ),
    _histogram(
        "request_queue_seconds",
        LATENCY_S,
        "From arrival to the first slice of the prompt.",
        vllm="request_queue_time_seconds",
    ),
    _histogram(
        "request_prefill_seconds",
        LATENCY_S,
        "From the first slice of the prompt to the first token.",
        vllm="request_prefill_time_seconds",
    ),
    _histogram(
        "request_decode_seconds",
        LATENCY_S,
        "From the first token to the last.",
        vllm="request_decode_time_seconds",
    ),
    _histogram(
        "request_inference_seconds",
        LATENCY_S,
        "From the first slice of the prompt to the last token.",
        vllm="request_inference_time_seconds",
    ),
    _histogram(
        "request_token_seconds",
        GAP_S,
        "Mean time per token after the first one, one value per request.",
        vllm="request_time_per_output_token_seconds",
    ),
    _histogram(
        "request_prompt_tokens",
        TOKENS,
        "Tokens of a request's prompt.",
        vllm="request_prompt_tokens",
    ),
    _histogram(
        "request_generation_tokens",
        TOKENS,
        "Tokens of a request's output.",
        vllm="request_generation_tokens",
    ),
    _histogram(
        "step_tokens",
        TOKENS,
        "Tokens of a step, by kind; a step without any of a kind counts as 0 of it.",
        "kind",
    ),
    _histogram("step_all_tokens", TOKENS, "Tokens of a step.", vllm="iteration_tokens_total"),
    _histogram(
        "step_seconds",
        PHASE_S,
        "Time of a step's parts. In the core: `plan` decides, `apply` takes the answer in. On the "
        "rank that answers: `forward` waits for the stage before, if there is one, and runs the "
        "layers, `sample` the rest (on GPUs it also waits for the layers). `wire` is what is left "
        "of the time between two answers: encoding, sockets, reading.",
        "phase",
    ),
    _histogram(
        "recovery_seconds",
        LATENCY_S,
        "Recoveries from losses of worker groups, by phase: `noticed` since the group last gave a "
        "sign of life; then one after the other `fenced` until no process of it was left, `paused` "
        "until it was started again, `respawned` until its ranks had come, `weights` until they "
        "had loaded, `allocated` until it served; from the loss on, `ready` until it served and "
        "`first_token` until one of its streams went on, in whichever group.",
        "phase",
    ),
)
"""What the engine core answers."""

HTTP: Sequence[Family] = (
    _counter(
        "http_requests",
        "HTTP calls by route and status; status `left`: the caller was gone before there was "
        "one; route `other`: none of ours.",
        "route",
        "method",
        "status",
    ),
    _histogram(
        "http_request_seconds",
        LATENCY_S,
        "From an HTTP call's headers to the end of its answer.",
        "route",
    ),
    _histogram(
        "http_time_to_first_token_seconds",
        LATENCY_S,
        "From an HTTP call's headers to the first token of any of its outputs: reading the body, "
        "templates, token ids and grammars included.",
        "route",
    ),
    _counter(
        "http_callers_left",
        "Calls whose caller closed the connection before the answer was whole.",
        "route",
    ),
)
"""What the API servers of one cluster know, all of them together."""
