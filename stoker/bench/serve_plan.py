"""Which runs `stoker bench serve` makes, and how one is made."""

import gc
import math
import random
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from time import process_time

from stoker.bench.arrivals import arrival_times
from stoker.bench.errors import BenchError
from stoker.bench.figures import figures_of, warnings_of
from stoker.bench.load import Load, Pace, Post, Run, Sending
from stoker.bench.progress import requests_bar
from stoker.bench.report import Point
from stoker.bench.request_form import RequestForm
from stoker.bench.stream import Clock
from stoker.bench.workload import Recorded, Workload, short_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Tempo:
    """How fast one run goes."""

    request_rate: float | None = None
    """Requests per second; None: not by a rate."""
    max_concurrency: int | None = None
    """Most requests under way; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """Everything that is measured in one call.

    Raises:
        BenchError: settings that do not fit together.
    """

    form: RequestForm
    workload: Workload
    tempos: Sequence[Tempo]
    """One run each, one after the other."""
    num_prompts: int | None = None
    """Requests of each run; None: as many as the file has, or as the duration allows, or 100."""
    duration_s: float | None = None
    burstiness: float = 1.0
    timeout_s: float = 600.0
    num_warmups: int = 0
    """Requests that are sent before each run, one after the other, and not counted."""
    seed: int = 0
    is_salted: bool = False
    """Whether each run has its own `cache_salt`."""
    objectives_ms: Mapping[str, float] | None = None
    expects_cache: bool = False
    keeps_requests: bool = False

    def __post_init__(self) -> None:
        for tempo in self.tempos:
            if self.count is None and not self._is_bounded(tempo):
                raise BenchError(
                    "--duration without --num-prompts would send requests without end at once; "
                    "give --request-rate, --max-concurrency or --num-prompts"
                )
            if self._has_own_arrivals(tempo) and (self.count or 0) > len(self._recorded_arrivals()):
                raise BenchError(
                    f"--num-prompts {self.count} is more than the {self.workload} with arrival "
                    "times; give --request-rate or --max-concurrency to send them again"
                )

    @property
    def count(self) -> int | None:
        """Requests of each run; None: as many as the duration allows."""
        if self.num_prompts is not None or self.duration_s is not None:
            return self.num_prompts
        return len(self.workload.entries) if isinstance(self.workload, Recorded) else 100

    def pace(self, tempo: Tempo) -> tuple[Pace, str]:
        """When the requests of a run go out, and that in words."""
        rate, limit = tempo.request_rate, tempo.max_concurrency
        at_most = "" if limit is None else f", at most {limit} at once"
        arrivals: Iterable[float] | None
        if self._has_own_arrivals(tempo):
            arrivals, words = self._recorded_arrivals(), "as in the trace"
        elif limit is not None and (rate is None or math.isinf(rate)):
            arrivals, words, at_most = None, f"{limit} at a time", ""
        else:
            rate = math.inf if rate is None else rate
            chance = random.Random(f"{self.seed} arrivals")
            arrivals = arrival_times(rate, self.burstiness, chance)
            law = "Poisson" if self.burstiness == 1 else f"gamma, burstiness {self.burstiness:g}"
            words = "all at once" if math.isinf(rate) else f"{rate:g}/s, {law}"
        pace = Pace(
            arrivals=arrivals,
            max_concurrency=limit,
            duration_s=self.duration_s,
            timeout_s=self.timeout_s,
        )
        return pace, words + at_most

    def sendings(self, run: str) -> Iterable[Sending]:
        """The requests of one run; made beforehand where their number is known."""
        form = self.form
        if self.is_salted:
            form = replace(form, fields={**form.fields, "cache_salt": f"bench-{run}"})
        calls = islice(self.workload.calls(self.seed, run), self.count)
        made = (form.sending(call) for call in calls)
        return made if self.count is None else list(made)

    def warm_up(self, run: str) -> list[Sending]:
        """The requests that come before the run's own."""
        calls = short_calls(self.workload.made_of, self.seed, run, self.num_warmups)
        return [self.form.sending(call) for call in calls]

    def _is_bounded(self, tempo: Tempo) -> bool:
        is_rate = tempo.request_rate is not None and not math.isinf(tempo.request_rate)
        return is_rate or tempo.max_concurrency is not None or self._has_own_arrivals(tempo)

    def _has_own_arrivals(self, tempo: Tempo) -> bool:
        is_free = tempo.request_rate is None and tempo.max_concurrency is None
        return is_free and bool(self._recorded_arrivals())

    def _recorded_arrivals(self) -> list[float]:
        """Of a trace in which every request has one; empty: there is no such trace."""
        if not isinstance(self.workload, Recorded):
            return []
        found = [c.arrival_s for c in self.workload.entries if c.arrival_s is not None]
        return found if len(found) == len(self.workload.entries) else []


async def measure(
    plan: ServePlan, post: Post, clock: Clock, *, shows_progress: bool = False
) -> list[Point]:
    """Make all runs of a plan, one after the other."""
    points = []
    for i, tempo in enumerate(plan.tempos, start=1):
        point = await _measure_one(plan, tempo, post, clock, shows_progress)
        points.append(point)
        if shows_progress and len(plan.tempos) > 1:
            figures, count = point.figures, len(plan.tempos)
            print(
                f"run {i} of {count} ({point.label}): {figures.completed} of {figures.sent} "
                f"requests in {figures.duration_s:.1f} s",
                file=sys.stderr,
            )
    return points


async def _measure_one(
    plan: ServePlan, tempo: Tempo, post: Post, clock: Clock, shows_progress: bool
) -> Point:
    run_id = secrets.token_hex(8)
    if plan.num_warmups:
        await Load(post, Pace(arrivals=None, max_concurrency=1), clock).run(plan.warm_up(run_id))
    pace, words = plan.pace(tempo)
    sendings = plan.sendings(run_id)
    gc.collect()
    gc.freeze()  # a pause to look through all bodies would look like the server's
    cpu_s = process_time()
    try:
        with requests_bar(words, plan.count, is_wanted=shows_progress) as tell:
            run: Run = await Load(post, pace, clock, tell).run(sendings)
    finally:
        gc.unfreeze()
    figures = figures_of(run, client_cpu_s=process_time() - cpu_s, objectives_ms=plan.objectives_ms)
    rate = tempo.request_rate
    return Point(
        request_rate=None if rate is None or math.isinf(rate) else rate,
        max_concurrency=tempo.max_concurrency,
        arrivals=words,
        figures=figures,
        warnings=warnings_of(figures, expects_cache=plan.expects_cache),
        requests=run.records if plan.keeps_requests else None,
    )
