"""Schedulers, requests and a driver with valid defaults; a test states only what matters."""

from collections import deque

import msgspec

from scheduler.arrays import int32
from scheduler.checks import check_scheduler
from scheduler.config import ModelLimits, SchedulerConfig
from scheduler.journal import Record
from scheduler.outbox import Outgoing
from scheduler.plan import StepPlan
from scheduler.request import Finish, Rejection, Request, Started
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.scripted import END, VOCAB, ScriptedWorker

CLIENT = 7


def make_request(
    handle: int = 0,
    prompt: list[int] | int = 5,
    max_tokens: int | None = 8,
    *,
    ends: bool = False,
    priority: int = 0,
    timeout_s: float | None = None,
    cache_salt: str | None = None,
    **sampling: object,
) -> Request:
    """A greedy request; a prompt given as a length is made of tokens of its own."""
    if isinstance(prompt, int):
        prompt = [(handle * 31 + i * 7 + i // 5) % (VOCAB - 1) + 1 for i in range(prompt)]
    return Request(
        handle=handle,
        prompt=int32(prompt),
        sampling=SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=not ends, **sampling
        ),
        end_ids=(END,),
        priority=priority,
        timeout_s=timeout_s,
        cache_salt=cache_salt,
    )


class Bench:
    """A scheduler with scripted groups, driven step by step; every step checks invariants."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_groups: int = 1,
        max_model_len: int = 400,
        **config: object,
    ) -> None:
        settings: dict[str, object] = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
        settings |= {"block_size": 4, "watermark": 0.0} | config
        self.records: list[Record] = []
        self.scheduler = Scheduler(
            SchedulerConfig(**settings),  # type: ignore[arg-type]
            ModelLimits(vocab_size=VOCAB, max_model_len=max_model_len),
            self.records.append,
        )
        self.workers: dict[int, ScriptedWorker] = {}
        self.in_flight: dict[int, deque[StepPlan]] = {}
        self.tables: dict[int, dict[int, list[int]]] = {}
        self.writes: dict[int, deque[set[int]]] = {}
        """Blocks that each unanswered plan may write."""
        self.now = 0.0
        self.num_blocks = num_blocks
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.finishes: dict[tuple[int, int], Finish] = {}
        self.cached: dict[tuple[int, int], int] = {}
        self.started: dict[tuple[int, int], Started] = {}
        self.messages: dict[tuple[int, int], str] = {}
        """Why requests ended, where there is something to say."""
        self.deaths: dict[tuple[int, int], tuple[str, ...]] = {}
        """What is held against requests."""
        for group in range(num_groups):
            self.add_group(group, num_blocks)

    def add_group(self, group: int, num_blocks: int, epoch: int = 1) -> None:
        self.take(self.scheduler.add_group(group, epoch, num_blocks, self.now))
        self.workers[group] = ScriptedWorker(
            num_blocks,
            self.scheduler.config.block_size,
            epoch=epoch,
            num_stages=self.scheduler.config.num_stages,
        )
        self.in_flight[group] = deque()
        self.tables[group], self.writes[group] = {}, deque()

    def lose_group(self, group: int, failure: str = "") -> None:
        self.take(self.scheduler.lose_group(group, self.now, failure))
        del self.workers[group], self.in_flight[group]
        check_scheduler(self.scheduler)

    def submit(self, request: Request, client: int = CLIENT) -> Rejection | None:
        answer = self.scheduler.submit(request, client, self.now)
        if isinstance(answer, Rejection):
            return answer
        self.outputs[client, request.handle] = request.output.tolist()
        if answer is not None:
            self.take([Outgoing(client, answer)])
        return None

    def carry_on(self, request: Request, client: int = CLIENT) -> None:
        """Submit a request that another scheduler, or this one, has begun, with its output."""
        output = self.outputs[client, request.handle]
        assert self.submit(msgspec.structs.replace(request, output=int32(output)), client) is None

    def plan(self, group: int = 0) -> StepPlan | None:
        plan = self.scheduler.plan(group, self.now)
        self.take(self.scheduler.end_failed(self.now))
        if plan is not None:
            self._check_blocks(group, plan)
            self.in_flight[group].append(plan)
        check_scheduler(self.scheduler)
        return plan

    def _check_blocks(self, group: int, plan: StepPlan) -> None:
        """No block may be handed out while an unanswered plan may write it."""
        size, tables = self.scheduler.config.block_size, self.tables[group]
        for slot in plan.released.tolist():
            del tables[slot]
        handed_out = set(plan.block.tolist())
        for admission in plan.admitted:
            tables[admission.slot] = admission.blocks.tolist()
            handed_out |= set(admission.blocks.tolist()[admission.num_cached // size :])
        for slot, block in zip(plan.block_slot.tolist(), plan.block.tolist(), strict=True):
            tables[slot].append(block)
        for writes in self.writes[group]:
            assert not handed_out & writes, "a block is handed out that a plan may write"
        counts = plan.count.tolist() or [1] * len(plan.slot)
        written: set[int] = set()
        for slot, start, count in zip(plan.slot.tolist(), plan.start.tolist(), counts, strict=True):
            written |= set(tables[slot][start // size : (start + count - 1) // size + 1])
        self.writes[group].append(written)

    def answer(self, group: int = 0) -> None:
        """The worker computes and answers its oldest plan."""
        result = self.workers[group].execute(self.in_flight[group].popleft())
        self.writes[group].popleft()
        self.take(self.scheduler.apply(group, result, self.now))
        check_scheduler(self.scheduler)

    def take(self, outgoing: list[Outgoing]) -> None:
        for out in outgoing:
            batch = out.batch
            counts = batch.count.tolist() or [1] * len(batch.handle)
            finish = batch.finish.tolist() or [0] * len(batch.handle)
            tokens = iter(batch.token.tolist())
            for handle, count, code in zip(batch.handle.tolist(), counts, finish, strict=True):
                key = out.client, handle
                assert key not in self.finishes, "news of a request that has ended"
                self.outputs[key] += [next(tokens) for _ in range(count)]
                if code:
                    self.finishes[key] = Finish(code)
            assert next(tokens, None) is None
            for told in batch.suspected:
                self.deaths[out.client, told.handle] = told.deaths
            for started in batch.started:
                self.cached[out.client, started.handle] = started.num_cached_tokens
                self.started[out.client, started.handle] = started
            for ended in batch.ended:
                if ended.message:
                    self.messages[out.client, ended.handle] = ended.message

    def step(self, group: int = 0) -> StepPlan | None:
        """Plan once, and answer everything in flight."""
        self.now += 1.0
        plan = self.plan(group)
        while self.in_flight[group]:
            self.answer(group)
        return plan

    def run(self, max_steps: int = 10_000) -> int:
        """Run all groups with as many plans in flight as may be until all is done."""
        steps = 0
        while not self.scheduler.is_idle:
            self.now += 1.0
            moved = False
            for group in self.workers:
                while self.plan(group) is not None:
                    moved, steps = True, steps + 1
                if self.in_flight[group]:
                    self.answer(group)
                    moved = True
            assert moved, "nothing moves, but requests are live"
            assert steps < max_steps, "the scheduler does not come to an end"
        for group in self.workers:
            while self.in_flight[group]:
                self.answer(group)
        return steps

    def idle_blocks(self, group: int = 0) -> int:
        return self.scheduler.groups[group].cache.num_idle
