"""The scheduler: which tokens every group computes next, and what comes of the results.

A plain object: messages and `now` go in, plans and news come out. It has no clock, no
socket, no thread and no tensor, so the same object runs live, in a simulator and in a
replay. Sequences are submitted, wait, run in a group, and end; losing a group or the race
for blocks puts them back to waiting with all their tokens.
"""

import heapq
import math
from collections.abc import Iterable

import numpy as np

from scheduler import journal as events
from scheduler.admission import AdmissionRules
from scheduler.arrays import NO_INT32, IndexArray, int32
from scheduler.budget import StepBudget
from scheduler.config import ModelLimits, SchedulerConfig
from scheduler.draft import StepDraft
from scheduler.errors import RequestFailed
from scheduler.group import Group, checksum
from scheduler.meter import Meter
from scheduler.outbox import Outbox, Outgoing
from scheduler.placement import Placement
from scheduler.plan import StepPlan, StepResult
from scheduler.policy import sort_key
from scheduler.queue_gate import QueueGate
from scheduler.request import Ended, Finish, Rejection, Request, Suspected, TokenBatch
from scheduler.sequences import Sequence
from scheduler.settling import settle
from scheduler.stats import Counters, GroupStats, SchedulerStats
from scheduler.stopping import end_tokens, finish_of_output
from scheduler.suspects import Suspects
from scheduler.waiting import WaitingQueue

_MAX_LOOK_AHEAD = 64
"""Waiting sequences looked at per plan, so that a blocked queue costs a bounded time."""


class Scheduler:
    """Owns every live sequence. Times are seconds of one monotonic clock of the caller's."""

    def __init__(
        self,
        config: SchedulerConfig,
        model: ModelLimits,
        journal: events.Journal | None = None,
    ) -> None:
        self.config, self.model = config, model
        self.counters = Counters()
        self.meter = Meter()
        self.groups: dict[int, Group] = {}
        self.waiting = WaitingQueue()
        self.live: dict[tuple[int, int], Sequence] = {}
        """Every live sequence by (client, handle)."""
        self._rules = AdmissionRules(config, model)
        self._gate = QueueGate(config)
        self._suspects = Suspects(config.poison_after, config.most_unanswered)
        self.failed: list[tuple[Sequence, Exception]] = []
        """Waiting ones that the last plan could not look at; `end_failed` ends them."""
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._next_serial = 0
        self._journal = journal
        self._record(events.opened(config, model))

    # --- groups ---

    def add_group(self, group_id: int, epoch: int, num_blocks: int, now: float) -> list[Outgoing]:
        """A group is ready to compute; it has never computed anything in this epoch."""
        assert group_id not in self.groups, f"group {group_id} is already here"
        self.groups[group_id] = Group(
            group_id=group_id,
            epoch=epoch,
            num_blocks=num_blocks,
            config=self.config,
            max_model_len=self.model.max_model_len,
            vocab_size=self.model.vocab_size,
        )
        self._record(events.GroupAdded(now=now, group=group_id, epoch=epoch, num_blocks=num_blocks))
        return self._fit_waiting(now)

    def drain_group(self, group_id: int, now: float, *, drains: bool = True) -> list[Outgoing]:
        """The group starts nothing new, and what runs in it goes on; or, not `drains`, it takes
        part again."""
        self._record(events.GroupDrained(now=now, group=group_id, drains=drains))
        self.groups[group_id].is_draining = drains
        return self._fit_waiting(now)

    def lose_group(self, group_id: int, now: float, failure: str = "") -> list[Outgoing]:
        """The group's K/V are gone: its sequences wait again, with all confirmed tokens.

        Args:
            failure: what went wrong; empty: no request can have caused it. One that is found to
                be the cause ends with an error.
        """
        self._record(events.GroupLost(now=now, group=group_id, failure=failure))
        group = self.groups.pop(group_id)
        struck = self._suspects.group_failed(group, failure) if failure else []
        lost = [group.running.leave(s.slot) for s in group.running.in_order()]
        lost += [sequence for _, sequence in group.leaving.values()]
        for sequence in lost:
            sequence.slot, sequence.group_id = -1, None
            self.waiting.add(sequence)
        ended = []
        if culprit := self._suspects.culprit(struck):
            self.counters.poisoned += 1
            struck.remove(culprit)
            ended = self._finish_early([culprit], Finish.ERROR, self._suspects.why(culprit), now)
        return ended + self._suspicions(struck) + self._fit_waiting(now)

    def _suspicions(self, sequences: list[Sequence]) -> list[Outgoing]:
        """Tell the clients of these what is held against them now."""
        by_client: dict[int, list[Suspected]] = {}
        for sequence in sequences:
            deaths = self._suspects.failures(sequence)
            told = Suspected(handle=sequence.request.handle, deaths=deaths)
            by_client.setdefault(sequence.client, []).append(told)
        return [
            Outgoing(client, TokenBatch(handle=NO_INT32, suspected=tuple(told)))
            for client, told in by_client.items()
        ]

    def _fit_waiting(self, now: float) -> list[Outgoing]:
        """No sequence may grow beyond the largest pool there is; some have reached it already."""
        if not self._open_groups:
            return []
        for sequence in self.waiting:
            sequence.limit = min(sequence.limit, self.max_len)
        full = [s for s in self.waiting if len(s.tokens) >= s.limit]
        return self._finish_early(full, Finish.LENGTH, "the KV pool became smaller", now)

    # --- requests ---

    def submit(self, request: Request, client: int, now: float) -> Rejection | TokenBatch | None:
        """Queue the request, or return what its client must be told at once.

        A `Rejection` says why not: nothing of the request is kept, nor if it makes this raise. A
        `TokenBatch` says that it is a continuation that has all its tokens, so that it has ended.
        """
        rejection = self._rules.check(
            request,
            is_live=(client, request.handle) in self.live,
            max_len=self.max_len,
        )
        if rejection is None and not request.is_continuation:
            rejection = self._gate.check(request, self.waiting, self._open_groups, now)
        serial = self._next_serial
        if rejection is None:
            sequence = self._new_sequence(serial, client, request, now)
            finish = finish_of_output(sequence)
        self._record(
            events.Submitted(
                now=now,
                client=client,
                request=request,
                refused=rejection.reason if rejection else None,
            )
        )
        if rejection is not None:
            self.counters.refuse(rejection.reason)
            return rejection
        self._next_serial += 1
        self.live[client, request.handle] = sequence
        self.waiting.add(sequence)
        self._suspects.came(sequence)
        self.counters.accepted += 1
        self.counters.continued += request.is_continuation
        if request.timeout_s is not None:
            deadline = sequence.arrival + request.timeout_s
            heapq.heappush(self._deadlines, (deadline, serial, sequence))
        if finish is Finish.NOT_YET:
            return None
        (ended,) = self._finish_early([sequence], finish, "", now)
        return ended.batch

    def _new_sequence(self, serial: int, client: int, request: Request, now: float) -> Sequence:
        sampling, tokens, last_token_at = request.sampling, request.prompt, math.nan
        if len(request.output):
            tokens, last_token_at = np.concatenate([tokens, request.output]), now
        wanted = sampling.max_tokens if sampling.max_tokens is not None else self.max_len
        arrival = now - request.age_s
        return Sequence(
            serial=serial,
            client=client,
            request=request,
            arrival=arrival,
            sort_key=sort_key(
                self.config, arrival=arrival, priority=request.priority, serial=serial
            ),
            limit=min(len(request.prompt) + wanted, self.max_len),
            end_ids=end_tokens(request),
            tokens=tokens,
            last_token_at=last_token_at,
        )

    @property
    def max_len(self) -> int:
        """Most tokens a sequence can have: the context, or the largest pool if that is less."""
        largest = max((group.max_len for group in self._open_groups), default=None)
        return self.model.max_model_len if largest is None else largest

    @property
    def _open_groups(self) -> list[Group]:
        """Those that start sequences."""
        return [group for group in self.groups.values() if not group.is_draining]

    def abort(self, client: int, handles: Iterable[int], now: float) -> None:
        """Forget these requests; unknown ones are ignored. No more news of them is sent."""
        known = [handle for handle in handles if (client, handle) in self.live]
        self._record(events.Aborted(now=now, client=client, handles=known))
        for handle in known:
            self._end(self.live[client, handle], Finish.ABORT, now)

    def abort_client(self, client: int, now: float) -> None:
        """Forget every request of a client that is gone."""
        self._record(events.Aborted(now=now, client=client, handles=None))
        for sequence in [s for (owner, _), s in self.live.items() if owner == client]:
            self._end(sequence, Finish.ABORT, now)

    def fail_waiting(self, message: str, now: float, *, begun: bool) -> list[Outgoing]:
        """End those that wait and have no token yet, and the `begun` ones too if so asked."""
        ending = [s.serial for s in self.waiting if begun or len(s.tokens) == s.num_prompt]
        return self.end_early(ending, Finish.ERROR, message, now)

    def next_deadline(self) -> float | None:
        """When `expire` must be called next."""
        while self._deadlines and not self.is_live(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> list[Outgoing]:
        """End the requests whose time is over, wherever they are."""
        late = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            late.append(heapq.heappop(self._deadlines)[1])
        return self.end_early(late, Finish.TIMEOUT, "timeout_s passed", now) if late else []

    def end_early(
        self, serials: Iterable[int], finish: Finish, message: str, now: float
    ) -> list[Outgoing]:
        """End live sequences, wherever they are, and tell their clients why."""
        wanted = set(serials)
        self._record(
            events.Expired(now=now, serials=sorted(wanted), finish=finish, message=message)
        )
        sequences = [s for s in self.live.values() if s.serial in wanted]
        return self._finish_early(sequences, finish, message, now)

    def _finish_early(
        self, sequences: list[Sequence], finish: Finish, message: str, now: float
    ) -> list[Outgoing]:
        for sequence in sequences:
            self._end(sequence, finish, now)
        return Outbox(
            client=int32([s.client for s in sequences]),
            handle=int32([s.request.handle for s in sequences]),
            count=np.zeros(len(sequences), dtype=np.int32),
            token=int32([]),
            finish=np.full(len(sequences), finish, dtype=np.uint8),
            ended=[
                (
                    s.client,
                    Ended(
                        handle=s.request.handle,
                        num_preemptions=s.num_preemptions,
                        message=message,
                    ),
                )
                for s in sequences
            ],
        ).batches()

    def is_live(self, sequence: Sequence) -> bool:
        """Whether it has not ended."""
        return self.live.get((sequence.client, sequence.request.handle)) is sequence

    def length(self, sequence: Sequence) -> int:
        """Its tokens that are known, wherever it is; of one that has ended, those it had when it
        last waited."""
        if sequence.slot < 0 or sequence.group_id is None:
            return len(sequence.tokens)
        return int(self.groups[sequence.group_id].running.confirmed[sequence.slot])

    def _end(self, sequence: Sequence, finish: Finish, now: float) -> None:
        """Forget the sequence, wherever it is."""
        if sequence.group_id is None:
            self.waiting.remove(sequence)
        else:
            self._gate.stay_time.left()
            group = self.groups[sequence.group_id]
            if sequence.slot >= 0:
                group.finish(sequence.slot)
            else:
                del group.leaving[sequence.serial]
        del self.live[sequence.client, sequence.request.handle]
        self._suspects.left(sequence)
        self.counters.finish(finish.name.lower())
        self.meter.ended(sequence, finish, now)

    # --- steps ---

    def end_failed(self, now: float) -> list[Outgoing]:
        """End the requests that the last plan could not look at."""
        failed, self.failed = self.failed, []
        news: list[Outgoing] = []
        for sequence, error in failed:
            news += self.end_early([sequence.serial], Finish.ERROR, why_failed(error), now)
        return news

    def plan(self, group_id: int, now: float) -> StepPlan | None:
        """The next step of a group. None: nothing to compute, or enough plans in flight.

        Call `end_failed` after it, which has something to do where one request alone failed.

        Raises:
            RequestFailed: for the sake of this request no plan could be made, nor can any more.
        """
        group = self.groups[group_id]
        if len(group.unanswered) >= self.config.most_unanswered:
            return None
        draft = StepDraft()
        decodes, prefills = group.due()
        if self.config.exclusive_phases:
            self._plan_prompts(group, draft, prefills, now)
            if not draft.num_tokens:
                self._plan_decodes(group, draft, decodes)
        else:
            self._plan_decodes(group, draft, decodes)
            self._plan_prompts(group, draft, prefills, now)
        if not draft.num_tokens:
            if draft.preempted:
                self._count(group, draft)
                self._record_plan(group, draft, None, now)
            return None
        plan = group.dispatch(draft)
        self._count(group, draft)
        self._record_plan(group, draft, plan, now)
        return plan

    def _plan_decodes(self, group: Group, draft: StepDraft, slots: IndexArray) -> None:
        for sequence in group.decode(draft, slots):
            draft.preempted.append(sequence)
            if sequence.group_id is None:
                self.waiting.add(sequence)

    def _plan_prompts(self, group: Group, draft: StepDraft, slots: IndexArray, now: float) -> None:
        """Deal the rest of the step's tokens out to prompts: running ones, then waiting ones."""
        group.is_short_of_blocks = False
        if not len(slots) and not len(self.waiting):
            return
        self._gate.stay_time.pass_time(self.num_running, now)
        budget = StepBudget(self.config, spent=draft.num_tokens)
        rows = group.running
        running = [slot for slot in slots.tolist() if rows.serial[slot] >= 0]
        for nth, slot in enumerate(running):
            wanted = int(rows.known[slot] - rows.planned[slot])
            others_wait = nth + 1 < len(running) or len(self.waiting) > 0
            count = budget.share(wanted, others_wait=others_wait)
            if count:
                group.prefill(draft, slot, count)
                budget.spend(count)
        if not draft.preempted and not group.is_draining:
            self._admit(group, draft, budget, now)
        for slot, taken in draft.prefills():
            wanted = int(rows.known[slot] - rows.planned[slot])
            if more := budget.top_up(wanted, taken):
                group.prefill(draft, slot, more)
                budget.spend(more)

    def _admit(self, group: Group, draft: StepDraft, budget: StepBudget, now: float) -> None:
        """Start waiting sequences while tokens, slots and blocks last.

        Smaller ones may pass a first one that lacks blocks, a bounded number of times.
        """
        blocked: Sequence | None = None
        candidates = self.waiting.first(_MAX_LOOK_AHEAD) if group.running.num_free else []
        if not candidates:
            return
        growth = group.growth
        placement = Placement(self.groups.values()) if len(self.groups) > 1 else None
        for nth, sequence in enumerate(candidates):
            if not budget.left or not group.running.num_free:
                return
            if blocked and blocked.num_bypasses >= self.config.max_head_bypasses:
                return
            try:
                cached = group.match(sequence)
                if placement is not None and placement.deal(sequence) is not group:
                    reason: str | None = "group"
                else:
                    reason = self._why_not(group, sequence, cached, growth)
            except Exception as error:  # nothing has changed yet
                self.failed.append((sequence, error))
                continue
            if reason is not None:
                draft.deferred[sequence.serial] = reason
                if reason == "blocks" and blocked is None:
                    blocked = sequence
                    group.is_short_of_blocks = True
                continue
            if blocked is not None:
                blocked.num_bypasses += 1
            wanted = len(sequence.tokens) - len(cached) * self.config.block_size
            count = budget.share(wanted, others_wait=nth + 1 < len(candidates))
            self.waiting.remove(sequence)
            self._count_start(sequence, len(cached), now)
            try:
                group.admit(draft, sequence, cached, count)
            except Exception as error:
                raise RequestFailed(sequence.client, sequence.request.handle) from error
            budget.spend(count)
            growth += sequence.limit - len(sequence.tokens)

    def _why_not(
        self, group: Group, sequence: Sequence, cached: list[int], growth: int
    ) -> str | None:
        """Why the sequence does not start in this group now; None: it does."""
        if sequence.limit > group.max_len:
            return "group"
        if self._suspects.must_wait(group, sequence):
            return "suspect"
        if group.computes_soon(sequence, cached):
            return "prefix"
        return None if self._rules.has_room(group, sequence, cached, growth) else "blocks"

    def apply(self, group_id: int, result: StepResult, now: float) -> list[Outgoing]:
        """Take the group's answer to its oldest unanswered plan.

        Raises:
            ProtocolError: it answers another plan. The group must be lost then.
            RequestFailed: for the sake of this request; the scheduler is of no use any more.
        """
        group = self.groups.get(group_id)
        if group is None or result.epoch != group.epoch:
            self.counters.stale_results += 1
            return []
        self._gate.stay_time.pass_time(self.num_running, now)
        answered = group.unanswered[0] if group.unanswered else None
        settled = settle(group, result, now)
        self.counters.output_tokens += len(settled.outbox.token)
        self.counters.dropped_tokens += settled.num_dropped
        self.meter.gaps(settled.gaps_s)
        self.meter.took("forward", result.forward_s)
        self.meter.took("sample", result.compute_s - result.forward_s)
        for sequence in settled.started:
            self.meter.started(sequence, now)
        for sequence, finish in settled.finished:
            self._end(sequence, finish, now)
        cleared: list[Outgoing] = []
        if len(self._suspects) and answered is not None:
            cleared = self._suspicions(self._suspects.went_on(answered))
        for sequence in group.returned():
            self.waiting.add(sequence)
        if self._journal is not None:
            self._record(
                events.Applied(
                    now=now,
                    group=group_id,
                    result=result,
                    finished=[sequence.serial for sequence, _ in settled.finished],
                )
            )
        return cleared + settled.outbox.batches()

    # --- figures ---

    def has_work(self, group_id: int) -> bool:
        """Whether the group has something to compute or to answer."""
        group = self.groups[group_id]
        can_start = len(self.waiting) > 0 and not group.is_draining
        return bool(group.unanswered or group.num_running or can_start)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(len(group.leaving) for group in self.groups.values())

    @property
    def num_running(self) -> int:
        return sum([len(group.running.order) for group in self.groups.values()])

    @property
    def num_promised(self) -> int:
        """Refused requests that were told when to come back, and have not yet."""
        return self._gate.num_promised

    @property
    def is_idle(self) -> bool:
        return not self.live

    def stats(self) -> SchedulerStats:
        counters = self.counters
        return SchedulerStats(
            waiting=self.num_waiting,
            waiting_tokens=self.waiting.num_tokens,
            promised=self.num_promised,
            running=self.num_running,
            steps=counters.steps,
            mixed_steps=counters.mixed_steps,
            prefill_steps=counters.prefill_steps,
            decode_tokens=counters.decode_tokens,
            prefill_tokens=counters.prefill_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            queried_tokens=counters.queried_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            preemptions=counters.preemptions,
            accepted=counters.accepted,
            continued=counters.continued,
            finished=dict(counters.finished),
            refused=dict(counters.refused),
            stale_results=counters.stale_results,
            dropped_tokens=counters.dropped_tokens,
            poisoned=counters.poisoned,
            groups=tuple(_group_stats(group) for group in self.groups.values()),
        )

    def _count_start(self, sequence: Sequence, num_cached_blocks: int, now: float) -> None:
        num_cached = num_cached_blocks * self.config.block_size
        is_first = sequence.started_at is None
        if is_first:
            sequence.started_at = now
        if is_first and not len(sequence.request.output):
            sequence.num_cached_tokens = num_cached
            self.counters.cached_tokens += num_cached
            if self.config.enable_prefix_caching and sequence.reads_cache:
                self.counters.queried_tokens += len(sequence.tokens)
        else:
            self.counters.recomputed_tokens += len(sequence.tokens) - num_cached

    def _count(self, group: Group, draft: StepDraft) -> None:
        counters = self.counters
        counters.steps += draft.num_tokens > 0
        counters.mixed_steps += bool(draft.num_decode and draft.num_prefill)
        counters.prefill_steps += draft.num_decode == 0 < draft.num_prefill
        counters.decode_tokens += draft.num_decode
        counters.prefill_tokens += draft.num_prefill
        counters.preemptions += len(draft.preempted)
        if draft.num_tokens:
            self.meter.planned(draft.num_prefill, draft.num_decode)

    def _record(self, record: events.Record) -> None:
        if self._journal is not None:
            self._journal(record)

    def _record_plan(
        self, group: Group, draft: StepDraft, plan: StepPlan | None, now: float
    ) -> None:
        if self._journal is None:
            return
        self._journal(
            events.Planned(
                now=now,
                group=group.group_id,
                epoch=group.epoch,
                step=plan.step if plan else 0,
                decode_tokens=draft.num_decode,
                prefill_tokens=draft.num_prefill,
                num_running=group.num_running,
                num_waiting=self.num_waiting,
                idle_blocks=group.cache.num_idle,
                predicted_s=group.step_time.predict(draft.num_tokens),
                checksum=checksum(plan) if plan else 0,
                admitted=[sequence.serial for sequence in draft.admitted],
                preempted=[sequence.serial for sequence in draft.preempted],
                deferred=draft.deferred,
            )
        )


def why_failed(error: BaseException) -> str:
    """What the client of a request is told that made the engine core raise an error."""
    return f"the engine failed to handle this request: {type(error).__name__}: {error}"


def _group_stats(group: Group) -> GroupStats:
    return GroupStats(
        group=group.group_id,
        epoch=group.epoch,
        step=group.step,
        unanswered=len(group.unanswered),
        running=group.num_running,
        num_blocks=group.cache.num_blocks,
        idle_blocks=group.cache.num_idle,
        cached_blocks=len(group.cache.index),
        peak_blocks=group.peak_blocks,
    )
