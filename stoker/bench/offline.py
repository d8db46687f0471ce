"""Batches through a cluster's own client, timed: what is measured without HTTP."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import msgspec
from msgspec import Struct

from cluster.messages.reports import Status
from scheduler.sampling import SamplingParams
from stoker.bench.errors import BenchError
from stoker.bench.peak_memory import PeakMemory
from stoker.bench.workload import TOKEN_IDS, Call, MadeUp
from stoker.client import Client, OnAnswer
from stoker.outputs import RequestOutput
from stoker.spread import Spread, spread_of

FIELDS = ("temperature", "top_p", "top_k", "ignore_eos")
"""Options that are sampling parameters."""
WHOLE_ENDS = ("stop", "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch that has been answered."""

    outputs: list[RequestOutput]
    wall_s: float
    peak_bytes: int
    """Most memory that this process and those below it held at once meanwhile."""
    before: Status
    after: Status


class OfflineLatencies(Struct, frozen=True, kw_only=True):
    """Latencies of the requests of batches, in milliseconds, by the client's clock."""

    ttft_ms: Spread | None
    """From submission, so in a batch the wait for a place is a part of it."""
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None

    def named(self) -> list[tuple[str, Spread | None]]:
        """By the names that a table gives them."""
        return [
            ("TTFT", self.ttft_ms),
            ("TPOT", self.tpot_ms),
            ("ITL", self.itl_ms),
            ("end to end", self.e2e_ms),
        ]


def run_batch(
    client: Client,
    calls: Sequence[Call],
    sampling: SamplingParams,
    *,
    on_answer: OnAnswer | None = None,
    without_pid: int | None = None,
) -> Batch:
    """Answer all calls, each with its own `max_tokens`.

    Args:
        without_pid: a process below this one whose memory is not counted.
    Raises:
        BenchError: an answer ended by an error, a timeout or an abort.
    """
    prompts = [_prompt_of(call) for call in calls]
    params = [msgspec.structs.replace(sampling, max_tokens=call.max_tokens) for call in calls]
    before = client.status()
    began_s = perf_counter()
    with PeakMemory(without=without_pid) as peak:
        outputs = client.generate(prompts, params, on_answer=on_answer)
        wall_s = perf_counter() - began_s
    for output in outputs:
        for completion in output.outputs:
            if completion.finish_reason not in WHOLE_ENDS:
                raise BenchError(
                    f"request {output.request_id} ended by {completion.finish_reason}: "
                    f"{completion.message}"
                )
    return Batch(
        outputs=outputs,
        wall_s=wall_s,
        peak_bytes=peak.bytes,
        before=before,
        after=client.status(),
    )


def sampling_asked(arguments: argparse.Namespace, client: Client) -> SamplingParams:
    """The model's own sampling with what the user set put over it."""
    given = {name: value for name, value in vars(arguments).items() if name in FIELDS}
    return msgspec.structs.replace(client.get_default_sampling_params(), **given)


def made_of_vocabulary(client: Client, token_ids: tuple[int, int] = TOKEN_IDS) -> MadeUp:
    """What prompts are made of, less the ids that the model does not have."""
    first, last = token_ids
    last = min(last, client.info().vocab_size - 1)
    return MadeUp(token_ids=(min(first, last // 2), last))


def latencies_of(outputs: Iterable[RequestOutput]) -> OfflineLatencies:
    """How the latencies of all requests spread."""
    outputs = list(outputs)
    ttft_s, tpot_s, e2e_s = [], [], []
    for output in outputs:
        metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
        if metrics.ttft_s is None or metrics.total_s is None:
            continue
        ttft_s.append(metrics.ttft_s)
        e2e_s.append(metrics.total_s)
        if num_tokens > 1:
            tpot_s.append((metrics.total_s - metrics.ttft_s) / (num_tokens - 1))
    return OfflineLatencies(
        ttft_ms=spread_of(1e3 * value for value in ttft_s),
        tpot_ms=spread_of(1e3 * value for value in tpot_s),
        itl_ms=spread_of(1e3 * gap for output in outputs for gap in output.metrics.itl_s),
        e2e_ms=spread_of(1e3 * value for value in e2e_s),
    )


def _prompt_of(call: Call) -> str | list[int]:
    prompt = call.prompt
    if isinstance(prompt, str):
        return prompt
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) != len(prompt):
        raise BenchError(
            "a trace of conversations needs `stoker bench serve --endpoint chat`; offline there "
            "are prompts as texts and as token ids"
        )
    return ids
