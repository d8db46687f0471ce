"""A whole cluster in one process: the real scheduler, the real wire format, the real ranks.

Only processes and sockets are left out, so that hundreds of variants of a cluster can be
tried in the time that starting a few real ones takes. Ranks are threads; every message is
encoded and decoded as it would be. Time is a number that grows with each step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from cluster.wire import FROM_CLIENT, FROM_ENGINE, TO_CLIENT, TO_ENGINE
from scheduler.arrays import int32
from scheduler.checks import check_scheduler
from scheduler.config import ModelLimits, SchedulerConfig
from scheduler.journal import Record
from scheduler.plan import LogprobRows, StepPlan, StepResult
from scheduler.request import Finish, Rejection, Request, TokenBatch
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler
from tests.worker.groups import WorkerGroup, only_answer
from worker.runner import ModelRunner

GROUP = 0
CLIENT = 1
STEP_S = 0.01
MAX_MODEL_LEN = 2048
END = 2
"""SmolLM2's end token."""


@dataclass(slots=True)
class Answer:
    """One request and what came of it, as its client sees it."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Which step brought each token."""
    slices: list[tuple[int, int]] = field(default_factory=list)
    """Start and count of each piece in which it was computed."""
    logprobs: dict[int, dict[int, float]] = field(default_factory=dict)
    """By position in the sequence: of the token there, and of the most probable ones."""
    finish: Finish = Finish.NOT_YET
    message: str = ""
    num_cached: int = 0
    num_preemptions: int = 0

    def chosen(self) -> list[float]:
        """Log-probabilities of the output tokens, as the float32 numbers that were sent."""
        first = len(self.prompt)
        return [self.logprobs[first + at][token] for at, token in enumerate(self.tokens)]


class LoadedRanks:
    """The ranks of one group, with weights that are loaded once and used by many clusters."""

    def __init__(
        self, model_dir: Path, tp: int, pp: int = 1, max_model_len: int = MAX_MODEL_LEN
    ) -> None:
        self.tp, self.pp, self.max_model_len = tp, pp, max_model_len
        self._group = WorkerGroup(model_dir, tp=tp, pp=pp, max_model_len=max_model_len)
        self._threads = ThreadPoolExecutor(
            tp * pp, initializer=torch.set_num_threads, initargs=(1,)
        )
        list(self._threads.map(ModelRunner.load, self._group.runners))

    def fresh(self, num_blocks: int, **settings: int) -> list[ModelRunner]:
        """Runners of the same weights with empty pools."""
        runners = []
        for loaded in self._group.runners:
            config = replace(loaded._config, num_kv_blocks=num_blocks, **settings)
            runner = ModelRunner(config, loaded._communicator, loaded._pipes)
            runner._decoder, runner._ops = loaded._decoder, loaded._ops
            runner._incoming = loaded._incoming
            runner.allocate(num_blocks)
            runners.append(runner)
        return runners

    def execute(self, runners: Sequence[ModelRunner], frame: bytes) -> bytes:
        """Every rank reads the same plan; the answer as it would be sent."""

        def one(runner: ModelRunner) -> StepResult | None:
            plan = FROM_ENGINE.decode(frame)
            assert isinstance(plan, StepPlan)
            return runner.execute(plan)

        results = list(self._threads.map(one, runners))
        return TO_ENGINE.encode(only_answer(results, self._group.answering))

    def close(self) -> None:
        self._threads.shutdown()
        for runner in self._group.runners:
            runner.close()


class InProcessCluster:
    """One scheduler and one group of ranks, joined as the engine core joins them."""

    def __init__(
        self,
        ranks: LoadedRanks,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        plans_in_flight: int = 2,
        **scheduler: object,
    ) -> None:
        self._ranks = ranks
        self._make_runners = partial(
            ranks.fresh,
            num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.runners = self._make_runners()
        self.records: list[Record] = []
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_plans_in_flight=plans_in_flight,
                num_stages=ranks.pp,
                **scheduler,  # type: ignore[arg-type]  # a test's own words
            ),
            ModelLimits(
                vocab_size=self.runners[0].spec.vocab_size, max_model_len=ranks.max_model_len
            ),
            self.records.append,
        )
        self.now = 0.0
        self.answers: dict[int, Answer] = {}
        self.num_steps = 0
        self._in_flight: deque[bytes] = deque()
        self.scheduler.add_group(GROUP, 1, num_blocks, self.now)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        cache_salt: str | None = None,
        output: Sequence[int] = (),
    ) -> Answer:
        """`output`: tokens that another cluster has answered already."""
        handle = len(self.answers)
        sent = Request(
            handle=handle,
            prompt=int32(prompt),
            sampling=sampling,
            end_ids=(END,),
            cache_salt=cache_salt,
            output=int32(output),
        )
        request = FROM_CLIENT.decode(FROM_CLIENT.encode(sent))
        assert isinstance(request, Request)
        rejection = self.scheduler.submit(request, CLIENT, self.now)
        assert not isinstance(rejection, Rejection), rejection
        self.answers[handle] = Answer(list(prompt), sampling, tokens=list(output))
        return self.answers[handle]

    def abort(self, answer: Answer) -> None:
        handle = next(key for key, value in self.answers.items() if value is answer)
        self.scheduler.abort(CLIENT, [handle], self.now)
        answer.finish = Finish.ABORT

    def step(self) -> None:
        """Plan as far ahead as is allowed, compute the oldest plan, take in its result."""
        while (plan := self.scheduler.plan(GROUP, self.now)) is not None:
            self.plans.append(plan)
            self._note_slices(plan)
            self._in_flight.append(FROM_ENGINE.encode(plan))
        check_scheduler(self.scheduler)
        assert self._in_flight, "there is work, but nothing is planned and nothing is awaited"
        answered = self._ranks.execute(self.runners, self._in_flight.popleft())
        result = TO_ENGINE.decode(answered)
        assert isinstance(result, StepResult)
        self.results.append(result)
        self.num_steps += 1
        self.now += STEP_S
        for outgoing in self.scheduler.apply(GROUP, result, self.now):
            assert outgoing.client == CLIENT
            batch = TO_CLIENT.decode(TO_CLIENT.encode(outgoing.batch))
            assert isinstance(batch, TokenBatch)
            self._take(batch)
        check_scheduler(self.scheduler)

    def run(self, on_step: Callable[[], None] | None = None) -> None:
        """Until nothing is live; `on_step` may submit and abort between steps."""
        while not self.scheduler.is_idle or self._in_flight:
            if on_step is not None:
                on_step()
            if not self.scheduler.is_idle or self._in_flight:
                self.step()
        self.check_empty()

    def run_again(self) -> list[StepResult]:
        """What fresh ranks with empty pools answer to the plans of the past."""
        runners, results = self._make_runners(), []
        for plan in self.plans:
            answer = self._ranks.execute(runners, FROM_ENGINE.encode(plan))
            result = TO_ENGINE.decode(answer)
            assert isinstance(result, StepResult)
            results.append(result)
        return results

    def check_empty(self) -> None:
        """Nothing of the requests is left."""
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, len(self.scheduler.live)) == (0, 0, 0)
        (group,) = stats.groups
        assert group.idle_blocks == group.num_blocks
        assert group.unanswered == 0

    def _note_slices(self, plan: StepPlan) -> None:
        running = self.scheduler.groups[GROUP].running
        counts = plan.count.tolist() or [1] * len(plan.slot)
        for slot, *piece in zip(plan.slot.tolist(), plan.start.tolist(), counts, strict=True):
            self.answers[running.at(slot).request.handle].slices.append((piece[0], piece[1]))

    def _take(self, batch: TokenBatch) -> None:
        handles = batch.handle.tolist()
        counts = batch.count.tolist() or [1] * len(handles)
        tokens = iter(batch.token.tolist())
        for handle, count in zip(handles, counts, strict=True):
            answer = self.answers[handle]
            assert answer.finish is Finish.NOT_YET, "news of a request that has ended"
            for _ in range(count):
                answer.tokens.append(next(tokens))
                answer.steps.append(self.num_steps)
        assert next(tokens, None) is None
        for handle, finish in zip(handles, batch.finish.tolist(), strict=False):
            self.answers[handle].finish = Finish(finish)
        for started in batch.started:
            self.answers[started.handle].num_cached = started.num_cached_tokens
        for ended in batch.ended:
            self.answers[ended.handle].num_preemptions = ended.num_preemptions
            self.answers[ended.handle].message = ended.message
        if batch.logprobs is not None:
            self._take_logprobs(handles, batch.logprobs)

    def _take_logprobs(self, handles: list[int], rows: LogprobRows) -> None:
        ids = rows.token.reshape(-1, rows.width).tolist()
        values = rows.logprob.reshape(-1, rows.width).tolist()
        for row, position, own_ids, own in zip(
            rows.row.tolist(), rows.position.tolist(), ids, values, strict=True
        ):
            answer = self.answers[handles[row]]
            assert position not in answer.logprobs, f"position {position} came twice"
            pairs = zip(own_ids, own, strict=True)
            answer.logprobs[position] = {token: value for token, value in pairs if token >= 0}
