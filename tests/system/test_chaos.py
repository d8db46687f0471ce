"""A real cluster under load and under random faults: no stream is dropped, no token lost."""

from pathlib import Path

import pytest

from bench.chaos.__main__ import options
from bench.chaos.cluster import Served
from bench.chaos.model import make_tiny_model
from bench.chaos.storm import Result, StormConfig, run_storm, table

pytestmark = pytest.mark.model

STEP_TIMEOUT_S = 15.0
"""Longer than a step takes on a machine that does other things too."""


def blow(config: StormConfig, smollm2: Path, folder: Path) -> Result:
    model = make_tiny_model(folder / "tiny", smollm2)
    log = folder / "cluster.log"
    with Served(model, log, options(config.step_timeout_s)) as served:
        result = run_storm(served, config, print)
    for row in table(result, config):
        print(*row, sep=": ")
    return result


def check(result: Result) -> None:
    assert result.verdict.dropped == []
    assert result.verdict.short == []
    assert result.verdict.doubled == []
    assert result.verdict.changed == []
    assert result.held_blocks == 0
    assert result.left_behind == []
    assert [fault.sentence() for fault in result.faults if fault.is_broken] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nobody_is_harmed_by_a_few_random_faults(smollm2: Path, tmp_path: Path) -> None:
    config = StormConfig(
        num_faults=6,
        seed=5,
        num_calls=30,
        num_callers=4,
        num_http=2,
        pause_s=0.5,
        haste_share=1.0,
        with_engine=False,
        kinds=frozenset({"kill", "raise", "cut"}),
        step_timeout_s=STEP_TIMEOUT_S,
    )
    result = blow(config, smollm2, tmp_path)
    check(result)
    assert result.num_noticed == 6


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nobody_is_harmed_by_forty_random_faults_of_all_kinds(
    smollm2: Path, tmp_path: Path
) -> None:
    result = blow(
        StormConfig(num_faults=40, seed=3, step_timeout_s=STEP_TIMEOUT_S), smollm2, tmp_path
    )
    check(result)
    assert result.num_noticed > 20
