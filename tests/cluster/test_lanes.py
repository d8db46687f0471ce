"""How long a group's steps take."""

import pytest

from cluster.lanes import WINDOW_S, Lane


def test_the_oldest_plan_has_the_time_of_one_step_from_when_it_could_begin() -> None:
    lane = Lane(1, (b"peer",))
    assert lane.deadline(10.0) is None
    lane.sent(100.0)
    lane.sent(101.0)
    assert lane.deadline(10.0) == 110.0
    lane.answered(105.0)
    assert lane.deadline(10.0) == 115.0
    lane.answered(106.0)
    assert lane.deadline(10.0) is None


def test_the_step_rate_is_of_the_last_seconds() -> None:
    lane = Lane(1, (b"peer",))
    for step in range(1000):
        lane.sent(step * 0.1)
        lane.answered(step * 0.1)
    assert lane.steps_per_s(99.9) == pytest.approx(10.0, rel=0.1)
    assert lane.num_steps == 1000
    assert lane.steps_per_s(99.9 + 2 * WINDOW_S) == 0.0
