"""The random number of each token, as a function of (seed, position) and nothing else.

SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014, figure 16, whose mixer is David Stafford's variant 13): the n-th output of a
stream is one mix of its start plus n odd steps, so any output is had without the ones
before. The start is the mixed seed, so that near seeds begin far apart on the cycle of
2**64 outputs.

Only wrapping 64-bit multiplication, addition, xor and logical shifts are used: numpy's
uint64, a GPU kernel's uint64, and int64 with masked shifts give the same bits.
"""

import numpy as np
import numpy.typing as npt

STEP = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, made odd: the distance between neighbours of a stream."""
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shift and multiplier of the mixer's first two rounds."""
LAST_SHIFT = 31

IntArray = npt.NDArray[np.int64] | npt.NDArray[np.int32]


def uniform(seed: IntArray, position: IntArray) -> npt.NDArray[np.float64]:
    """A double in [0, 1) with 53 random bits for each (seed, position).

    Args:
        seed: any int64.
        position: of the token that the number chooses; at least 0. Broadcasts with `seed`.
    """
    with np.errstate(over="ignore"):
        start = mixed(np.asarray(seed, dtype=np.int64).astype(np.uint64))
        step = np.asarray(position, dtype=np.int64).astype(np.uint64) + np.uint64(1)
        bits = mixed(start + step * np.uint64(STEP))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mixed(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each value with its bits spread over all 64: a bijection, so no two values meet."""
    for shift, factor in MIX:
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    return value ^ (value >> np.uint64(LAST_SHIFT))
