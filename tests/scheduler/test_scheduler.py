import numpy as np
import pytest

from scheduler.arrays import int32
from scheduler.errors import ConfigError, ProtocolError
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Finish, Request
from scheduler.sampling import SamplingParams
from tests.scheduler.builders import CLIENT, Bench, make_request
from tests.scheduler.scripted import expected_output


def tokens_per_slot(plan: StepPlan | None) -> dict[int, int]:
    assert plan is not None
    counts = plan.count.tolist() or [1] * len(plan.slot)
    return dict(zip(plan.slot.tolist(), counts, strict=True))


def total_preemptions(bench: Bench) -> int:
    return bench.scheduler.counters.preemptions


def test_a_prompt_in_c_chunks_with_n_outputs_takes_c_plus_n_minus_1_steps() -> None:
    bench = Bench(max_num_batched_tokens=16, max_plans_in_flight=1)
    bench.submit(make_request(prompt=40, max_tokens=5))

    assert bench.run() == 3 + 5 - 1


def test_running_streams_keep_going_while_a_long_prompt_is_chunked() -> None:
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=4)
    bench.submit(make_request(1, prompt=2, max_tokens=100))
    bench.step()
    short = bench.scheduler.live[CLIENT, 1].slot
    bench.submit(make_request(2, prompt=20))

    plan = bench.step()

    long = bench.scheduler.live[CLIENT, 2].slot
    assert tokens_per_slot(plan) == {short: 1, long: 7}
    assert bench.scheduler.counters.mixed_steps == 1


def test_a_short_prompt_passes_a_long_one_that_is_being_chunked() -> None:
    bench = Bench(num_blocks=200, max_num_batched_tokens=32)
    bench.submit(make_request(1, prompt=300))
    bench.step()
    bench.submit(make_request(2, prompt=10))
    bench.step()

    assert len(bench.outputs[CLIENT, 2]) == 1
    assert bench.outputs[CLIENT, 1] == []


def test_several_prompts_are_partial_at_once_and_none_waits_for_the_tail_of_another() -> None:
    bench = Bench(num_blocks=200, max_num_batched_tokens=32, long_prefill_token_threshold=10)
    for handle in (1, 2, 3):
        bench.submit(make_request(handle, prompt=60))

    plan = bench.step()

    assert sorted(tokens_per_slot(plan).values()) == [10, 10, 10]


def test_a_lone_long_prompt_gets_the_whole_step() -> None:
    bench = Bench(num_blocks=200, max_num_batched_tokens=32)
    bench.submit(make_request(1, prompt=100))

    assert list(tokens_per_slot(bench.step()).values()) == [32]


def test_a_blocked_prompt_does_not_halve_the_step_of_the_one_before_it() -> None:
    bench = Bench(num_blocks=30, max_num_batched_tokens=32)
    bench.submit(make_request(1, prompt=100))
    bench.submit(make_request(2, prompt=90))

    assert list(tokens_per_slot(bench.step()).values()) == [32]


def test_exclusive_phases_never_mix_prompts_and_streams() -> None:
    bench = Bench(exclusive_phases=True, max_num_batched_tokens=16)
    for handle in range(6):
        bench.submit(make_request(handle, prompt=10 + 9 * handle, max_tokens=6))
        bench.step()
    bench.run()

    assert bench.scheduler.counters.mixed_steps == 0
    assert bench.scheduler.counters.decode_tokens > 0


@pytest.mark.parametrize("plans", [1, 2])
def test_a_preempted_request_ends_with_the_same_tokens(plans: int) -> None:
    bench = Bench(num_blocks=12, max_plans_in_flight=plans, enable_prefix_caching=False)
    for handle in (1, 2):
        bench.submit(make_request(handle, prompt=8, max_tokens=36))
    bench.run()

    assert total_preemptions(bench) > 0
    for handle in (1, 2):
        prompt = make_request(handle, prompt=8).prompt.tolist()
        assert bench.outputs[CLIENT, handle] == expected_output(prompt, 44, ends=False)


def test_a_pool_too_small_for_all_costs_little_more_than_admitting_fewer() -> None:
    def run(max_num_seqs: int) -> Bench:
        bench = Bench(num_blocks=39, block_size=16, max_num_seqs=max_num_seqs, watermark=0.02)
        for handle in range(10):
            bench.submit(make_request(handle, prompt=100, max_tokens=100))
        bench.steps = bench.run()  # type: ignore[attr-defined]
        return bench

    free, limited = run(10), run(3)

    assert total_preemptions(limited) == 0
    assert 0 < total_preemptions(free) <= 10
    assert free.steps <= 1.5 * limited.steps  # type: ignore[attr-defined]


def test_a_shared_prefix_is_computed_once_by_requests_that_arrive_together() -> None:
    bench = Bench(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=64)
    prefix = [(i * 7) % 40 + 1 for i in range(128)]
    for handle in range(32):
        bench.submit(make_request(handle, [*prefix, 1 + handle], max_tokens=2))
    bench.run()

    counters = bench.scheduler.counters
    assert counters.prefill_tokens + counters.decode_tokens <= 128 + 32 + 32
    assert counters.cached_tokens == 31 * 128


def test_a_second_round_of_the_same_prompts_hits_fully() -> None:
    bench = Bench(num_blocks=400, max_num_seqs=32)
    prompts = [[(i * h) % 40 + 1 for i in range(65)] for h in range(1, 9)]
    for handle, prompt in enumerate(prompts):
        bench.submit(make_request(handle, prompt))
    bench.run()
    for handle, prompt in enumerate(prompts):
        bench.submit(make_request(100 + handle, prompt))
    bench.run()

    assert all(bench.cached[CLIENT, 100 + h] == 64 for h in range(len(prompts)))


@pytest.mark.parametrize("length", [8, 16, 32])
def test_a_fully_cached_prompt_still_computes_its_last_token(length: int) -> None:
    bench = Bench()
    prompt = list(range(1, length + 1))
    for handle in (1, 2, 3):
        bench.submit(make_request(handle, prompt))
        bench.run()
        assert bench.outputs[CLIENT, handle] == bench.outputs[CLIENT, 1]
    bench.submit(make_request(4, [*prompt, 5, 6]))
    bench.run()

    assert bench.cached[CLIENT, 1] == 0
    assert bench.cached[CLIENT, 2] == bench.cached[CLIENT, 3] == length - 4
    assert bench.cached[CLIENT, 4] == length


def test_output_of_a_finished_request_is_reused_by_the_next_turn() -> None:
    bench = Bench()
    bench.submit(make_request(1, prompt=8, max_tokens=9))
    bench.run()
    turn = make_request(1, prompt=8).prompt.tolist() + bench.outputs[CLIENT, 1]
    bench.submit(make_request(2, [*turn, 3]))
    bench.run()

    assert bench.cached[CLIENT, 2] == 16


def test_prefixes_of_different_salts_are_never_shared() -> None:
    bench = Bench()
    for handle, salt in enumerate(["a", "b", None, "a"]):
        bench.submit(make_request(handle, list(range(1, 20)), cache_salt=salt))
        bench.run()

    assert [bench.cached[CLIENT, h] for h in range(4)] == [0, 0, 0, 16]


def test_a_request_with_prompt_logprobs_computes_its_whole_prompt() -> None:
    bench = Bench()
    bench.submit(make_request(1, list(range(1, 20))))
    bench.run()
    bench.submit(make_request(2, list(range(1, 20)), prompt_logprobs=0))
    bench.run()

    assert bench.cached[CLIENT, 2] == 0


def test_a_prompt_longer_than_the_pool_is_refused_at_once_with_both_sizes() -> None:
    bench = Bench(num_blocks=12, max_model_len=400)
    for handle in (1, 2, 3):
        bench.submit(make_request(handle, prompt=5))

    rejection = bench.submit(make_request(9, prompt=300))

    assert rejection is not None
    assert rejection.reason == "too_long"
    assert "300 tokens" in rejection.message
    assert "76 KV blocks" in rejection.message
    assert "has 12" in rejection.message
    bench.run()
    assert all(len(bench.outputs[CLIENT, h]) == 8 for h in (1, 2, 3))


def test_prompts_around_the_context_limit_are_refused_or_yield_what_fits() -> None:
    bench = Bench(max_model_len=30)

    rejections = [bench.submit(make_request(n, prompt=n, max_tokens=9)) for n in (29, 30, 31)]
    bench.run()

    assert rejections[0] is None
    assert bench.finishes[CLIENT, 29] == Finish.LENGTH
    assert len(bench.outputs[CLIENT, 29]) == 1
    for rejection in rejections[1:]:
        assert rejection is not None
        assert "max_model_len=30" in rejection.message


def test_without_max_tokens_the_context_is_filled() -> None:
    bench = Bench(max_model_len=64)
    bench.submit(make_request(1, prompt=30, max_tokens=None))
    bench.run()

    assert len(bench.outputs[CLIENT, 1]) == 34
    assert bench.finishes[CLIENT, 1] == Finish.LENGTH


def test_a_full_queue_refuses_by_requests_and_by_tokens_and_takes_new_ones_after() -> None:
    bench = Bench(max_waiting_requests=8, max_waiting_tokens=100)
    by_tokens = [bench.submit(make_request(h, prompt=30)) for h in range(4)]
    assert [r and r.reason for r in by_tokens] == [None, None, None, "queue_full"]
    bench.run()
    by_count = [bench.submit(make_request(10 + h, prompt=2)) for h in range(10)]
    assert [r and r.reason for r in by_count] == [None] * 8 + ["queue_full"] * 2
    bench.run()

    assert bench.submit(make_request(50)) is None


def test_a_request_ends_when_its_time_is_over_waiting_or_running() -> None:
    bench = Bench(max_num_seqs=1, max_num_batched_tokens=8)
    bench.submit(make_request(1, max_tokens=100, timeout_s=5.0))
    bench.submit(make_request(2, timeout_s=2.5))
    for _ in range(2):
        bench.step()
        bench.take(bench.scheduler.expire(bench.now))
    assert bench.finishes == {}
    bench.step()
    bench.take(bench.scheduler.expire(bench.now))
    assert bench.finishes == {(CLIENT, 2): Finish.TIMEOUT}
    assert bench.scheduler.next_deadline() == 5.0
    bench.now = 5.0
    bench.take(bench.scheduler.expire(bench.now))

    assert bench.finishes[CLIENT, 1] == Finish.TIMEOUT
    assert len(bench.outputs[CLIENT, 1]) == 3
    assert bench.scheduler.is_idle


def test_a_high_priority_request_starts_next_and_ties_go_by_arrival() -> None:
    bench = Bench(max_num_seqs=1, max_num_batched_tokens=8, policy="priority")
    for handle in range(4):
        bench.submit(make_request(handle, max_tokens=2, priority=5))
    bench.submit(make_request(9, max_tokens=2, priority=0))
    order: list[int] = []
    while not bench.scheduler.is_idle:
        bench.step()
        order += [h for _, h in bench.finishes if h not in order]

    assert order == [9, 0, 1, 2, 3]


def test_a_low_priority_request_still_runs_under_a_steady_stream_of_high_ones() -> None:
    bench = Bench(
        max_num_seqs=1, max_num_batched_tokens=8, policy="priority", priority_ageing_s=10.0
    )
    bench.submit(make_request(0, max_tokens=1, priority=3))
    handle = 1
    while (CLIENT, 0) not in bench.finishes:
        bench.submit(make_request(handle, max_tokens=1, priority=0))
        handle += 1
        bench.step()
        assert bench.now < 100.0

    assert bench.now > 25.0


def test_priority_without_its_policy_is_refused() -> None:
    rejection = Bench().submit(make_request(priority=1))

    assert rejection is not None
    assert rejection.param == "priority"
    assert "scheduling_policy=fcfs" in rejection.message


def test_small_requests_pass_a_blocked_first_one_only_so_often() -> None:
    bench = Bench(num_blocks=20, max_num_seqs=4, max_head_bypasses=3, enable_prefix_caching=False)
    bench.submit(make_request(0, prompt=20, max_tokens=50))
    bench.step()
    bench.submit(make_request(1, prompt=60, max_tokens=2))
    started_before = []
    for handle in range(2, 30):
        bench.submit(make_request(handle, prompt=2, max_tokens=1))
        bench.step()
        if (CLIENT, 1) not in bench.finishes:
            started_before.append((CLIENT, handle) in bench.finishes)
    bench.run()

    assert sum(started_before) == 3
    assert len(bench.outputs[CLIENT, 1]) == 2


def test_a_late_result_for_an_aborted_request_is_dropped_and_counted() -> None:
    bench = Bench()
    bench.submit(make_request(1))
    bench.submit(make_request(2))
    bench.plan()
    bench.plan()
    bench.scheduler.abort(CLIENT, [1, 77], bench.now)
    while bench.in_flight[0]:
        bench.answer()
    bench.run()

    assert bench.outputs[CLIENT, 1] == []
    assert len(bench.outputs[CLIENT, 2]) == 8
    assert bench.scheduler.counters.dropped_tokens == 2
    assert bench.idle_blocks() == 64


def test_a_result_of_an_older_epoch_is_dropped_and_counted() -> None:
    bench = Bench(num_groups=2)
    bench.submit(make_request(1))
    plan = bench.plan(0)
    assert plan is not None
    bench.lose_group(0)
    bench.add_group(0, 64, epoch=2)

    stale = StepResult(epoch=1, step=plan.step, token=int32([3]))

    assert bench.scheduler.apply(0, stale, bench.now) == []
    assert bench.scheduler.counters.stale_results == 1
    bench.run()
    assert len(bench.outputs[CLIENT, 1]) == 8


def test_a_result_out_of_order_or_of_wrong_size_is_an_error_with_both_numbers() -> None:
    bench = Bench()
    bench.submit(make_request(1))
    bench.plan()

    with pytest.raises(ProtocolError, match="answered step 2, expected 1"):
        bench.scheduler.apply(0, StepResult(epoch=1, step=2, token=int32([3])), 0.0)
    with pytest.raises(ProtocolError, match="2 tokens, 1 slices sample"):
        bench.scheduler.apply(0, StepResult(epoch=1, step=1, token=int32([3, 4])), 0.0)


def test_sequences_of_a_lost_group_go_on_in_another_with_the_same_tokens() -> None:
    bench = Bench(num_groups=2)
    for handle in range(6):
        bench.submit(make_request(handle, prompt=9, max_tokens=20))
    for _ in range(5):
        for group in (0, 1):
            bench.step(group)
    assert bench.scheduler.groups[0].num_running
    assert bench.scheduler.groups[1].num_running
    bench.lose_group(0)
    bench.run()

    for handle in range(6):
        prompt = make_request(handle, prompt=9).prompt.tolist()
        assert bench.outputs[CLIENT, handle] == expected_output(prompt, 29, ends=False)


def test_a_request_runs_only_where_it_fits_and_ends_by_length_when_that_is_gone() -> None:
    bench = Bench(num_blocks=10)
    bench.add_group(1, 60)
    for handle in (1, 2):
        bench.submit(make_request(handle, prompt=30, max_tokens=100))
    for _ in range(15):
        bench.step(0)
        bench.step(1)
    assert {bench.scheduler.live[CLIENT, h].group_id for h in (1, 2)} == {1}
    bench.lose_group(1)
    bench.run()

    for handle in (1, 2):
        assert bench.finishes[CLIENT, handle] == Finish.LENGTH
        prompt = make_request(handle, prompt=30).prompt.tolist()
        output = bench.outputs[CLIENT, handle]
        assert len(output) >= 10
        assert output == expected_output(prompt, 200, ends=False)[: len(output)]


def test_a_request_goes_to_the_group_that_holds_its_prefix_and_else_to_the_idler_one() -> None:
    bench = Bench(num_groups=2, num_blocks=200)
    stem = list(range(1, 33))
    bench.submit(make_request(1, stem, max_tokens=30))
    bench.step(0)
    assert bench.scheduler.groups[0].num_running == 1
    bench.submit(make_request(2, [*stem, 7], max_tokens=30))
    bench.submit(make_request(3, [9] * 30, max_tokens=30))
    for group in (1, 0):
        bench.step(group)

    assert bench.scheduler.live[CLIENT, 2].group_id == 0
    assert bench.scheduler.live[CLIENT, 3].group_id == 1


def test_two_clients_may_use_the_same_handle() -> None:
    bench = Bench()
    bench.submit(make_request(1, prompt=[3, 4, 5]), client=1)
    bench.submit(make_request(1, prompt=[6, 7]), client=2)
    bench.run()

    assert bench.outputs[1, 1] == expected_output([3, 4, 5], 11, ends=False)
    assert bench.outputs[2, 1] == expected_output([6, 7], 10, ends=False)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_request(1, prompt=[]), "prompt"),
        (make_request(1, prompt=[-1]), "prompt"),
        (make_request(1, prompt=[50]), "prompt"),
        (make_request(1, logit_bias={50: 1.0}), "logit_bias"),
        (make_request(1, stop_token_ids=[99]), "stop_token_ids"),
        (make_request(1, allowed_token_ids=[-3]), "allowed_token_ids"),
        (make_request(-1), "handle"),
        (make_request(1, timeout_s=0.0), "timeout_s"),
        (make_request(1, timeout_s=float("nan")), "timeout_s"),
        (make_request(1, cache_salt=""), "cache_salt"),
        (Request(handle=1, prompt=int32([1]), sampling=SamplingParams(temperature=1.0)), "seed"),
        (Request(handle=1, prompt=int32([1]), sampling=SamplingParams(n=2, seed=1)), "n"),
    ],
)
def test_a_wrong_request_is_refused_and_leaves_nothing_behind(
    request_: Request, param: str
) -> None:
    bench = Bench()

    rejection = bench.submit(request_)

    assert rejection is not None
    assert (rejection.reason, rejection.param) == ("invalid", param)
    assert bench.scheduler.is_idle


def test_a_handle_in_use_is_refused() -> None:
    bench = Bench()
    bench.submit(make_request(1))

    rejection = bench.submit(make_request(1))

    assert rejection is not None
    assert "handle 1 is in use" in rejection.message


def test_a_budget_below_the_number_of_sequences_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="Raise the first or lower the second"):
        Bench(max_num_seqs=16, max_num_batched_tokens=8)


def test_a_steady_decode_step_carries_only_slots_and_positions() -> None:
    bench = Bench(num_blocks=300, max_num_seqs=64, max_num_batched_tokens=512, block_size=16)
    for handle in range(64):
        bench.submit(make_request(handle, prompt=3, max_tokens=60))
    bench.step()

    plan = bench.step()

    assert plan is not None
    assert len(plan.slot) == len(plan.start) == 64
    for name in ("released", "block", "count", "samples", "given", "token"):
        assert len(getattr(plan, name)) == 0, name
    assert plan.admitted == ()


def test_many_end_tokens_end_a_request_like_few_do() -> None:
    bench = Bench(max_model_len=200)
    prompt = make_request(1).prompt.tolist()
    output = expected_output(prompt, 100, ends=False)
    last = output[7]
    others = [token for token in range(50) if token not in output[:8]][:20]
    bench.submit(make_request(1, max_tokens=60, stop_token_ids=[*others, last]))
    bench.run()

    assert bench.outputs[CLIENT, 1] == output[: output.index(last) + 1]
    assert bench.finishes[CLIENT, 1] == Finish.STOP


def test_ignore_eos_ignores_the_models_ends_but_not_the_callers() -> None:
    prompt = next([n, 1] for n in range(1, 50) if 0 in expected_output([n, 1], 60, ends=False)[:40])
    output = expected_output(prompt, 62, ends=False)
    for handle, sampling in enumerate(
        [{"ends": True}, {"ends": False}, {"ends": False, "stop_token_ids": [0]}]
    ):
        bench = Bench()
        bench.submit(make_request(handle, prompt, 60, **sampling))  # type: ignore[arg-type]
        bench.run()
        stops = handle != 1
        want = output[: output.index(0) + 1] if stops else output
        assert bench.outputs[CLIENT, handle] == want


def test_thousands_of_short_requests_leave_no_state_behind() -> None:
    bench = Bench(num_blocks=64, max_num_seqs=16)
    for handle in range(600):
        bench.submit(make_request(handle, prompt=1 + handle % 9, max_tokens=1 + handle % 3))
        if handle % 5 == 0:
            bench.scheduler.abort(CLIENT, [handle], bench.now)
        if handle % 7 == 0:
            bench.step()
    bench.run()

    scheduler = bench.scheduler
    group = scheduler.groups[0]
    assert not scheduler.live
    assert len(scheduler.waiting) == 0
    assert scheduler.waiting.num_tokens == 0
    assert not group._coming
    assert group.running.sequences == [None] * 16
    assert np.all(group.cache.tables.lengths == 0)
    assert bench.idle_blocks() == 64
