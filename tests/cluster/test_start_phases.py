"""Where the time of a start went."""

import time
from pathlib import Path

import pytest

from cluster.start_phases import PHASES, RANK_PHASES, StartClock, process_began


def clock_of_a_start() -> StartClock:
    clock = StartClock(began=100.0)
    clock.parts_launched(100.5)
    clock.backend_opened(104.0)
    clock.group_placed(0, 105.0)
    return clock


def test_phases_follow_one_another_and_add_up_to_the_whole_start() -> None:
    clock = clock_of_a_start()
    clock.group_ready(0, {"import": 2.0, "load": 0.75, "profile": 0.25}, 110.0)

    phases = clock.phases(111.0)

    assert phases == {
        "plan": 0.5,
        "backend": 3.5,
        "place": 1.0,
        "import": 2.0,
        "load": 0.75,
        "map": 0.0,
        "profile": 0.25,
        "allocate": 2.0,
        "serve": 1.0,
    }
    assert tuple(phases) == PHASES
    assert sum(phases.values()) == 11.0


def test_of_several_groups_the_one_that_was_ready_last_is_told_of() -> None:
    clock = clock_of_a_start()
    clock.group_placed(1, 106.0)
    clock.group_ready(0, {"import": 1.0}, 108.0)
    clock.group_ready(1, {"import": 2.0}, 109.0)

    phases = clock.phases(109.0)

    assert (phases["place"], phases["import"], phases["allocate"]) == (2.0, 2.0, 1.0)


@pytest.mark.parametrize("said", [{}, dict.fromkeys(RANK_PHASES, 1e9), {"load": -5.0, "x": 1.0}])
def test_whatever_a_rank_says_no_phase_is_negative_and_the_sum_stays(
    said: dict[str, float],
) -> None:
    clock = clock_of_a_start()
    clock.group_ready(0, said, 110.0)

    phases = clock.phases(111.0)

    assert min(phases.values()) >= 0.0
    assert sum(phases.values()) == pytest.approx(11.0)


def test_this_process_began_before_now_and_where_nobody_can_say_now(tmp_path: Path) -> None:
    before = time.monotonic()

    assert process_began() < before
    assert before <= process_began(tmp_path / "nothing") <= time.monotonic()
