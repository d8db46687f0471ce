"""`stoker chaos` against an engine on real sockets."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.errors import InvalidRequest
from stoker.chaos.command import at_random
from stoker.chaos.orders import Order, Shape
from stoker.chaos.storm import Storm
from stoker.cli import EXIT_FAILED, EXIT_OK, main, make_parser
from tests.cluster.cluster_rig import Rig, wait_for_status


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path, num_groups=2, allow_chaos=True) as rig:
        rig.start_worker(group=0)
        rig.start_worker(group=1)
        client = rig.client()
        wait_for_status(client, lambda now: all(group.state == "ready" for group in now.groups))
        yield rig


def test_a_fault_that_costs_nothing_is_told_as_such(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["chaos", "full", "--group=1", "--seconds=0.1", "--watch=0.1"]
    assert main([*command, f"--address={rig.front}"]) == EXIT_OK
    assert capsys.readouterr().out == "full, group 1: nothing was lost\n"


def test_a_loss_is_told_with_its_times_and_one_that_is_not_mended_fails(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["chaos", "cut", "--group=1", "--rank=0", "--timeout=1", "--json"]
    assert main([*command, f"--address={rig.front}"]) == EXIT_FAILED
    told = json.loads(capsys.readouterr().out)
    assert told["what"] == "cut"
    assert told["where"] == "rank 0 of group 1"
    assert told["noticed_s"] > 0
    assert "whole_s" not in told


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["kill"], "--group, --node or --engine"),
        ([], "--random"),
        (["raise", "--group=7"], "no rank"),
        (["raise", "--engine"], "raise is for ranks"),
        (["--random", "--kinds=sing"], "sing"),
    ],
)
def test_what_cannot_be_broken_is_refused_with_what_can(
    rig: Rig, given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", *given, f"--address={rig.front}"]) == EXIT_FAILED
    assert complaint in capsys.readouterr().err


class BusyStorm(Storm):
    """One whose cluster has just lost who is meant, as often as a test says."""

    def __init__(self, num_refusals: int) -> None:
        self.num_refusals = num_refusals
        self.happened: list[Order] = []

    def let_happen(self, order: Order) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise InvalidRequest("no rank that is loaded is meant")
        self.happened.append(order)

    def pause(self, seconds: float) -> None:
        """No time passes."""

    wait_whole = settle = lambda self: None


def test_a_fault_at_who_has_just_died_waits_until_the_cluster_is_whole() -> None:
    shape = Shape((0, 1), 2, ("",))
    arguments = make_parser().parse_args(["chaos", "--random", "--count=3", "--kinds=kill"])
    storm = BusyStorm(num_refusals=1)
    at_random(arguments, storm, lambda: shape)
    assert len(storm.happened) == 3

    with pytest.raises(InvalidRequest, match="no rank"):
        at_random(arguments, BusyStorm(num_refusals=2), lambda: shape)


def test_faults_drawn_by_chance_are_told_one_by_one(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["chaos", "--random", "--count=2", "--seed=1", "--kinds=full,delay", "--pause=0"]
    assert main([*command, "--watch=0", f"--address={rig.front}"]) == EXIT_OK
    assert capsys.readouterr().out.count("nothing was lost") == 2
