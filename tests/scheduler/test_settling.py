"""What an answer means: sequences that their worker could not go on with."""

from msgspec.structs import replace

from scheduler.plan import FailedSlice, StepPlan, StepResult
from scheduler.request import Finish
from tests.scheduler.builders import CLIENT, Bench, make_request
from tests.scheduler.scripted import ScriptedWorker, expected_output

REASON = "nothing may follow"


class FailingWorker:
    """A scripted worker that cannot sample for one slot from a step on."""

    def __init__(self, worker: ScriptedWorker, slot: int, first_step: int) -> None:
        self._worker, self._slot, self._first_step = worker, slot, first_step

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._worker.execute(plan)
        samples = plan.samples.tolist() or [True] * len(plan.slot)
        rows = [
            row
            for row, slot in enumerate(plan.slot.tolist())
            if slot == self._slot and samples[row] and plan.step >= self._first_step
        ]
        return replace(result, failed=tuple(FailedSlice(row=row, message=REASON) for row in rows))


def fail(bench: Bench, handle: int, first_step: int) -> None:
    """Have the request, which runs, fail from that step on."""
    slot = bench.scheduler.live[CLIENT, handle].slot
    bench.workers[0] = FailingWorker(bench.workers[0], slot, first_step)  # type: ignore[assignment]


def test_a_failed_sequence_ends_with_the_reason_and_others_go_on() -> None:
    """With two plans in flight it fails twice; the second time it is gone."""
    bench = Bench(max_plans_in_flight=2)
    others = [make_request(1, max_tokens=6), make_request(3, max_tokens=6)]
    for request in (others[0], make_request(2, max_tokens=6), others[1]):
        bench.submit(request)
    bench.plan()
    fail(bench, 2, first_step=3)

    bench.run()

    assert bench.finishes[CLIENT, 2] is Finish.ERROR
    assert bench.messages == {(CLIENT, 2): REASON}
    assert len(bench.outputs[CLIENT, 2]) == 2
    for request in others:
        assert bench.finishes[CLIENT, request.handle] is Finish.LENGTH
        assert bench.outputs[CLIENT, request.handle] == expected_output(
            request.prompt.tolist(), 5 + 6, ends=False
        )
    assert bench.scheduler.counters.output_tokens == 2 + 6 + 6


def test_a_sequence_may_fail_before_its_first_token() -> None:
    bench = Bench()
    bench.submit(make_request(1))
    bench.plan()
    fail(bench, 1, first_step=1)

    bench.run()

    assert bench.finishes == {(CLIENT, 1): Finish.ERROR}
    assert bench.outputs[CLIENT, 1] == []
    assert bench.started == {}


def test_a_sequence_that_was_preempted_meanwhile_fails_too() -> None:
    """Its answer comes when it waits already."""
    bench = Bench(num_blocks=8, max_plans_in_flight=2)
    for handle in (1, 2):
        bench.submit(make_request(handle, prompt=8, max_tokens=16))
    group = bench.scheduler.groups[0]
    while bench.plan() is not None or not group.leaving:
        if len(group.unanswered) == 2:
            bench.answer()
    (stays,) = group.running.order.tolist()
    (plan,) = bench.in_flight[0]
    (slot,) = set(plan.slot.tolist()) - {stays}
    bench.workers[0] = FailingWorker(  # type: ignore[assignment]
        bench.workers[0], slot, first_step=plan.step
    )
    ((_, gone),) = group.leaving.values()

    bench.answer()

    assert bench.finishes == {(CLIENT, gone.request.handle): Finish.ERROR}
    assert bench.messages == {(CLIENT, gone.request.handle): REASON}
    bench.run()
    assert list(bench.finishes.values()) == [Finish.ERROR, Finish.LENGTH]
