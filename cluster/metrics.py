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


ENGINE: Sequence[Family] = (
    Family(
        name="engine_up",
        kind="gauge",
        text="1 if the engine core answered this scrape; without it, most others are missing.",
    ),
    Family(
        name="engine_info",
        kind="gauge",
        text="1, with what is served as labels.",
        labels=("model", "engine_id", "version", "state"),
    ),
    Family(name="engine_uptime_seconds", kind="gauge", text="Since the engine core began."),
    Family(
        name="requests_running",
        kind="gauge",
        text="Sequences that hold blocks, of all groups.",
        vllm="num_requests_running",
    ),
    Family(
        name="requests_waiting",
        kind="gauge",
        text="Sequences in the queue, preempted ones included.",
        vllm="num_requests_waiting",
    ),
    Family(
        name="waiting_prompt_tokens",
        kind="gauge",
        text="Tokens that must be computed or found in a cache before all that wait could go on.",
    ),
    Family(
        name="requests_promised",
        kind="gauge",
        text="Refused requests that were told when to come back, and have not yet.",
    ),
    Family(name="clients", kind="gauge", text="Connections to the engine's front socket."),
    Family(name="groups_ready", kind="gauge", text="Worker groups that take plans."),
    Family(
        name="group_epoch",
        kind="gauge",
        text="Starts of a worker group; 1 if it was never lost.",
        labels=("group",),
    ),
    Family(
        name="group_requests_running",
        kind="gauge",
        text="Sequences that hold blocks in a group.",
        labels=("group",),
    ),
    Family(name="kv_blocks", kind="gauge", text="Blocks of a group's KV pool.", labels=("group",)),
    Family(
        name="kv_blocks_used",
        kind="gauge",
        text="Blocks that running sequences hold.",
        labels=("group",),
    ),
    Family(
        name="kv_blocks_cached",
        kind="gauge",
        text="Blocks with a prefix that can be reused, held or idle.",
        labels=("group",),
    ),
    Family(
        name="kv_cache_usage_ratio",
        kind="gauge",
        text="Share of all groups' blocks that running sequences hold, from 0 to 1.",
        vllm="kv_cache_usage_perc",
    ),
    Family(name="requests_accepted", kind="counter", text="Requests that entered the queue."),
    Family(
        name="requests_finished",
        kind="counter",
        text="Requests that ended, by why.",
        labels=("reason",),
        vllm="request_success",
        vllm_labels=("finished_reason",),
    ),
    Family(
        name="requests_refused",
        kind="counter",
        text="Requests that the engine did not take, by why.",
        labels=("reason",),
    ),
    Family(
        name="prompt_tokens",
        kind="counter",
        text="Of requests that were accepted.",
        vllm="prompt_tokens",
    ),
    Family(
        name="generation_tokens",
        kind="counter",
        text="Tokens that clients were sent.",
        vllm="generation_tokens",
    ),
    Family(
        name="tokens",
        kind="counter",
        text="Tokens by what it took: `prefill` were computed as part of a prompt, those that were "
        "`recomputed` after a preemption or a lost group included; `decode` one by one; `cached` "
        "were found in the prefix cache when their request started.",
        labels=("kind",),
    ),
    Family(
        name="prefix_cache_queried_tokens",
        kind="counter",
        text="Prompt tokens that were looked for in the prefix cache.",
        vllm="prefix_cache_queries",
    ),
    Family(
        name="prefix_cache_hit_tokens",
        kind="counter",
        text="Of these, found.",
        vllm="prefix_cache_hits",
    ),
    Family(
        name="dropped_tokens",
        kind="counter",
        text="Tokens sampled for requests that had ended meanwhile.",
    ),
    Family(
        name="preemptions",
        kind="counter",
        text="Running sequences that had to give up their blocks.",
        vllm="num_preemptions",
    ),
    Family(
        name="steps",
        kind="counter",
        text="Steps planned; `mixed` hold parts of prompts and running sequences.",
        labels=("mix",),
    ),
    Family(
        name="stale_results",
        kind="counter",
        text="Results of a worker group's earlier life, which were dropped.",
    ),
    Family(
        name="messages_dropped",
        kind="counter",
        text="Messages to the engine that were unreadable, too large, or from strangers.",
    ),
    Family(
        name="clients_cut_off",
        kind="counter",
        text="Clients that vanished or read too slowly.",
    ),
    Family(
        name="metric_errors",
        kind="counter",
        text="Measurements that failed or were impossible, such as a negative time.",
    ),
    Family(
        name="time_to_first_token_seconds",
        kind="histogram",
        text="From a request's arrival at the engine to its first token.",
        bounds=LATENCY_S,
        vllm="time_to_first_token_seconds",
    ),
    Family(
        name="inter_token_seconds",
        kind="histogram",
        text="From each token of a sequence to its next one.",
        bounds=GAP_S,
        vllm="inter_token_latency_seconds",
    ),
    Family(
        name="request_seconds",
        kind="histogram",
        text="From arrival to the last token, of requests that ended by themselves.",
        bounds=LATENCY_S,
        vllm="e2e_request_latency_seconds",
    ),
    Family(
        name="request_queue_seconds",
        kind="histogram",
        text="From arrival to the first slice of the prompt.",
        bounds=LATENCY_S,
        vllm="request_queue_time_seconds",
    ),
    Family(
        name="request_prefill_seconds",
        kind="histogram",
        text="From the first slice of the prompt to the first token.",
        bounds=LATENCY_S,
        vllm="request_prefill_time_seconds",
    ),
    Family(
        name="request_decode_seconds",
        kind="histogram",
        text="From the first token to the last.",
        bounds=LATENCY_S,
        vllm="request_decode_time_seconds",
    ),
    Family(
        name="request_inference_seconds",
        kind="histogram",
        text="From the first slice of the prompt to the last token.",
        bounds=LATENCY_S,
        vllm="request_inference_time_seconds",
    ),
    Family(
        name="request_token_seconds",
        kind="histogram",
        text="Mean time per token after the first one, one value per request.",
        bounds=GAP_S,
        vllm="request_time_per_output_token_seconds",
    ),
    Family(
        name="request_prompt_tokens",
        kind="histogram",
        text="Tokens of a request's prompt.",
        bounds=TOKENS,
        vllm="request_prompt_tokens",
    ),
    Family(
        name="request_generation_tokens",
        kind="histogram",
        text="Tokens of a request's output.",
        bounds=TOKENS,
        vllm="request_generation_tokens",
    ),
    Family(
        name="step_tokens",
        kind="histogram",
        text="Tokens of a step, by kind; a step without any of a kind counts as 0 of it.",
        labels=("kind",),
        bounds=TOKENS,
    ),
    Family(
        name="step_all_tokens",
        kind="histogram",
        text="Tokens of a step.",
        bounds=TOKENS,
        vllm="iteration_tokens_total",
    ),
    Family(
        name="step_seconds",
        kind="histogram",
        text="Time of a step's parts. In the core: `plan` decides, `apply` takes the answer in. On "
        "rank 0: `forward` runs the layers, `sample` the rest (on GPUs it also waits for the "
        "layers). `wire` is what is left of the time between two answers: encoding, sockets, "
        "reading.",
        labels=("phase",),
        bounds=PHASE_S,
    ),
)
"""What the engine core answers."""

HTTP: Sequence[Family] = (
    Family(
        name="http_requests",
        kind="counter",
        text="HTTP calls by route and status; status `left`: the caller was gone before there was "
        "one; route `other`: none of ours.",
        labels=("route", "method", "status"),
    ),
    Family(
        name="http_request_seconds",
        kind="histogram",
        text="From an HTTP call's headers to the end of its answer.",
        labels=("route",),
        bounds=LATENCY_S,
    ),
    Family(
        name="http_time_to_first_token_seconds",
        kind="histogram",
        text="From an HTTP call's headers to the first token of any of its outputs: reading the "
        "body, templates, token ids and grammars included.",
        labels=("route",),
        bounds=LATENCY_S,
    ),
    Family(
        name="http_callers_left",
        kind="counter",
        text="Calls whose caller closed the connection before the answer was whole.",
        labels=("route",),
    ),
)
"""What the API servers of one cluster know, all of them together."""
