"""When load asks for another group, and when for one less: by simulation, in seconds of its own."""

import itertools
from dataclasses import dataclass, field

import pytest

from cluster.autoscale import AutoscalePolicy, Autoscaler, Load

POLICY = AutoscalePolicy(min_groups=1, max_groups=4, up_after_s=5.0, down_after_s=60.0)


@dataclass
class Simulation:
    """A cluster whose load is so many groups' worth of sequences; groups take a while to start."""

    start_s: float = 10.0
    policy: AutoscalePolicy = POLICY
    wanted: int = 1
    ready: int = 1
    now: float = 0.0
    changes: list[tuple[float, int]] = field(default_factory=list)
    _ready_at: float = 0.0

    def __post_init__(self) -> None:
        self._scaler = Autoscaler(self.policy)

    def run(self, seconds: float, demand: float) -> None:
        """`demand`: how many groups would be full."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            if self.now >= self._ready_at:
                self.ready = self.wanted
            load = Load(
                num_ready=self.ready,
                is_changing=self.ready != self.wanted,
                queue_s=3.0 if demand > self.ready else 0.0,
                taken_share=min(1.0, demand / self.ready),
            )
            found = self._scaler.wanted(self.wanted, load, self.now)
            if found != self.wanted:
                self.changes.append((self.now, found))
                if found > self.wanted:
                    self._ready_at = self.now + self.start_s
                self.wanted = found


def test_load_that_lasts_brings_groups_one_by_one_up_to_the_most() -> None:
    simulation = Simulation()
    simulation.run(120, demand=9.0)

    assert [count for _, count in simulation.changes] == [2, 3, 4]
    times = [when for when, _ in simulation.changes]
    assert all(b - a >= simulation.start_s for a, b in itertools.pairwise(times))


def test_a_burst_shorter_than_the_patience_changes_nothing() -> None:
    simulation = Simulation()
    for _ in range(20):
        simulation.run(4, demand=3.0)
        simulation.run(4, demand=0.5)

    assert simulation.changes == []


def test_groups_go_slowly_when_the_load_has_gone_and_the_fewest_stay() -> None:
    simulation = Simulation(wanted=4, ready=4)
    simulation.run(400, demand=0.0)

    assert [count for _, count in simulation.changes] == [3, 2, 1]
    assert simulation.changes[0][0] >= POLICY.down_after_s


@pytest.mark.parametrize("demand", [0.3, 0.89, 1.0, 1.15, 1.7, 1.85, 2.5, 3.3, 3.61])
def test_a_steady_load_finds_one_number_of_groups_and_keeps_it(demand: float) -> None:
    simulation = Simulation()
    simulation.run(600, demand)
    settled = simulation.wanted
    simulation.changes.clear()
    simulation.run(2000, demand)

    assert simulation.changes == []
    assert settled >= min(demand, POLICY.max_groups)


def test_a_full_pool_asks_for_a_group_though_nobody_waits() -> None:
    scaler = Autoscaler(POLICY)
    load = Load(num_ready=2, is_changing=False, queue_s=0.0, taken_share=0.95)
    found = [scaler.wanted(2, load, float(second)) for second in range(6)]

    assert found == [2, 2, 2, 2, 2, 3]


def test_nothing_is_changed_while_a_group_comes_or_goes() -> None:
    scaler = Autoscaler(POLICY)
    load = Load(num_ready=1, is_changing=True, queue_s=9.0, taken_share=1.0)

    assert {scaler.wanted(2, load, float(second)) for second in range(100)} == {2}


def test_a_number_outside_the_limits_is_brought_inside_at_once() -> None:
    policy = AutoscalePolicy(min_groups=2, max_groups=3)
    load = Load(num_ready=1, is_changing=False, queue_s=0.0, taken_share=0.0)

    assert Autoscaler(policy).wanted(1, load, 0.0) == 2
    assert Autoscaler(policy).wanted(9, load, 0.0) == 3


def test_limits_that_cannot_be_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="min_groups=3 and max_groups=2"):
        AutoscalePolicy(min_groups=3, max_groups=2)
    with pytest.raises(ValueError, match=r"idle_share=0.9 must be below busy_share=0.5"):
        AutoscalePolicy(min_groups=1, max_groups=2, idle_share=0.9, busy_share=0.5)
