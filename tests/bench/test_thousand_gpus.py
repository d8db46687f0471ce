"""The simulation of a core with many groups, where the answer is known beforehand."""

import pytest

from bench.thousand_gpus import Load, needs, simulated

FAST = Load(step_s=0.05, share=0.1)


def test_a_core_with_time_to_spare_lets_no_device_stand_idle() -> None:
    core = simulated(2, FAST, io_s=0.0, window_s=0.5, seed=1)

    steps = 2 * 0.5 / FAST.step_s
    assert core.idle_share < 0.05
    assert core.figures.num_steps == pytest.approx(steps, rel=0.25)  # prompts lengthen some
    assert core.figures.num_tokens == pytest.approx(steps * 0.1 * 256, rel=0.4)
    assert core.figures.core_s < 0.5


def test_a_core_whose_steps_take_longer_than_the_devices_is_full_and_they_wait() -> None:
    io_s = 0.1
    core = simulated(2, FAST, io_s=io_s, window_s=2.0, seed=1)

    assert core.figures.num_steps <= 2.0 / io_s + 1
    assert core.figures.core_s == pytest.approx(2.0, rel=0.1)
    assert core.idle_share > 0.3


def test_cores_are_counted_by_what_a_step_costs_each() -> None:
    row = needs(1000, 8, step_ms=20.0, step_cpu_s=0.001)

    assert row[0] == "125 x 8"
    assert row[3:5] == ["14", "9"]  # groups at 70 % of a core, and cores for 125 of them
    assert row[6] == "112"
