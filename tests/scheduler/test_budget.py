"""How a step's tokens are dealt out to prompts."""

from scheduler.budget import StepBudget
from scheduler.config import SchedulerConfig


def shares(budget_tokens: int, prompts: list[int]) -> list[int]:
    """What each of the prompts gets of one step, the last one with nobody behind it."""
    budget = StepBudget(
        SchedulerConfig(max_num_batched_tokens=budget_tokens, max_num_seqs=8), spent=0
    )
    found = []
    for nth, prompt in enumerate(prompts):
        found.append(budget.share(prompt, others_wait=nth + 1 < len(prompts)))
        budget.spend(found[-1])
    return found


def test_a_long_prompt_leaves_half_of_the_rest_to_those_behind_it() -> None:
    assert shares(1024, [5000, 100, 5000, 5000]) == [512, 100, 206, 206]


def test_a_step_is_not_crumbled_into_slices_below_a_64th_of_it() -> None:
    dealt = shares(1024, [5000] * 12)

    assert dealt == [512, 256, 128, 64, 32, 16, 16, 0, 0, 0, 0, 0]
    assert sum(dealt) == 1024


def test_a_prompt_with_nobody_behind_it_takes_all_that_is_left() -> None:
    assert shares(1024, [100, 5000]) == [100, 924]
