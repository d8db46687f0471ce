"""The random number of a token: known values, the same bits everywhere, and fair."""

import numpy as np
import pytest
import torch

from tests.worker.chi_square import assert_fits
from worker.chance import STEP, mixed, uniform

ALL_BITS = 2**64 - 1
SEEDS = [0, 1, 2, 42, -1, -2, 2**63 - 1, -(2**63) + 1, 123456789]
POSITIONS = [0, 1, 2, 15, 16, 4095, 2**31 - 1]


def in_python(seed: int, position: int) -> float:
    """The definition in unbounded integers, written apart from the module."""

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & ALL_BITS
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & ALL_BITS
        return value ^ (value >> 31)

    state = (mix(seed & ALL_BITS) + (position + 1) * 0x9E3779B97F4A7C15) & ALL_BITS
    return (mix(state) >> 11) / 2**53


def in_torch_int64(seed: int, position: int) -> float:
    """The same with signed wrapping arithmetic, as a device without uint64 would do it."""

    def shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
        return (value >> bits) & ((1 << (64 - bits)) - 1)

    def mix(value: torch.Tensor) -> torch.Tensor:
        value = (value ^ shifted(value, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
        value = (value ^ shifted(value, 27)) * (0x94D049BB133111EB - 2**64)
        return value ^ shifted(value, 31)

    state = mix(torch.tensor([seed])) + torch.tensor([position + 1]) * (STEP - 2**64)
    return float(shifted(mix(state), 11).double() * 2.0**-53)


def test_a_stream_starts_with_the_published_values_of_splitmix64() -> None:
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [(1234567 + count * STEP) & ALL_BITS for count in range(1, 6)]

    assert mixed(np.array(states, dtype=np.uint64)).tolist() == published


@pytest.mark.parametrize("seed", SEEDS)
def test_numpy_python_and_signed_torch_arithmetic_give_the_same_bits(seed: int) -> None:
    positions = np.array(POSITIONS)
    numbers = uniform(np.full(len(positions), seed), positions)

    assert numbers.tolist() == [in_python(seed, position) for position in POSITIONS]
    assert numbers.tolist() == [in_torch_int64(seed, position) for position in POSITIONS]


def test_a_number_does_not_depend_on_the_others_asked_for() -> None:
    seeds, positions = np.meshgrid(np.array(SEEDS), np.array(POSITIONS))
    together = uniform(seeds, positions)

    for place in np.ndindex(together.shape):
        alone = uniform(seeds[place][None], positions[place][None])
        assert alone[0] == together[place]


def test_numbers_lie_from_0_to_below_1_and_do_not_repeat() -> None:
    seeds, positions = np.meshgrid(np.arange(-200, 200), np.arange(500))
    numbers = uniform(seeds, positions)

    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert len(np.unique(numbers)) == numbers.size


@pytest.mark.parametrize("seed", [0, 1, 42, -7, 2**62])
def test_the_positions_of_one_seed_are_uniform(seed: int) -> None:
    assert_uniform(uniform(np.array(seed), np.arange(100_000)))


@pytest.mark.parametrize("position", [0, 1, 37, 4095])
def test_the_seeds_of_one_position_are_uniform(position: int) -> None:
    assert_uniform(uniform(np.arange(100_000), np.array(position)))


@pytest.mark.parametrize(
    ("seed_step", "position_step"), [(0, 1), (1, 0), (1, 1), (1, -1), (0, 16), (2**32, 0)]
)
def test_neighbours_are_independent(seed_step: int, position_step: int) -> None:
    seeds, positions = np.meshgrid(np.arange(300), np.arange(100, 400))
    numbers = uniform(seeds, positions)
    neighbours = uniform(seeds + seed_step, positions + position_step)

    cells = np.histogram2d(numbers.ravel(), neighbours.ravel(), bins=16, range=[[0, 1], [0, 1]])[0]

    assert_fits(cells.ravel().astype(np.int64), np.full(256, numbers.size / 256))
    assert abs(np.corrcoef(numbers.ravel(), neighbours.ravel())[0, 1]) < 4 / numbers.size**0.5


@pytest.mark.parametrize("bit", [1, 2, 8, 30, 52, 53])
def test_single_bits_are_fair(bit: int) -> None:
    bits = (uniform(np.arange(1000)[:, None], np.arange(50)) * 2.0**bit).astype(np.int64) & 1

    assert_fits(np.bincount(bits.ravel(), minlength=2), np.full(2, bits.size / 2))


def assert_uniform(numbers: np.ndarray) -> None:
    counts = np.histogram(numbers, bins=200, range=(0, 1))[0]
    assert_fits(counts, np.full(200, numbers.size / 200))
