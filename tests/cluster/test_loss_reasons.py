"""What a loss is held against, as far as it can be known."""

import pytest

from cluster.loss_reasons import BY_REQUESTS, REASONS, LossReason, reason_of_exit
from cluster.ray_group import reason_in


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (-9, "died"),
        (-11, "died"),
        (-6, "died"),
        (1, "died"),
        (2, "died"),
        (0, "ended"),
        (-15, "ended"),
        (143, "ended"),
        (-2, "ended"),
        (-1, "ended"),
        (3, "cut"),
        (4, "cut"),
        (5, "cut"),
    ],
)
def test_how_a_process_ended_says_whether_a_request_can_be_the_cause(
    code: int, reason: LossReason
) -> None:
    assert reason_of_exit(code) == reason


def test_only_what_a_request_can_cause_counts_against_it() -> None:
    assert {*REASONS} - BY_REQUESTS == {"cut", "node", "ended", "start"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("The actor died because its node has died. Node Id: 12", "node"),
        ("The actor is dead because it was killed by `ray.kill`.", "ended"),
        ("Worker unexpectedly exits with a connection error code 2. End of file.", "died"),
    ],
)
def test_an_actor_whose_node_is_gone_is_told_from_one_that_died(
    text: str, reason: LossReason
) -> None:
    assert reason_in(text) == reason
