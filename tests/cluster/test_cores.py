"""Dealing cores out to ranks."""

import pytest

from cluster.cores import deal_cores


@pytest.mark.parametrize(
    ("cores", "num_shares", "dealt"),
    [
        ((0, 1), 1, ((0, 1),)),
        ((0, 1), 2, ((0,), (1,))),
        ((0, 1), 3, ((0,), (1,), (0,))),
        ((2, 3, 5, 7, 11), 2, ((2, 3, 5), (7, 11))),
    ],
)
def test_cores_are_dealt_out_as_evenly_as_they_go(
    cores: tuple[int, ...], num_shares: int, dealt: tuple[tuple[int, ...], ...]
) -> None:
    assert deal_cores(cores, num_shares) == dealt


def test_no_cores_or_no_shares_cannot_be_dealt() -> None:
    with pytest.raises(ValueError, match="cannot deal"):
        deal_cores((), 1)
    with pytest.raises(ValueError, match="cannot deal"):
        deal_cores((0,), 0)
