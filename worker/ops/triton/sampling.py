"""Draws a token per row of logits on the device: temperature, min_p, top_k, top_p, chance.

The meaning is that of `worker.sampler` and `worker.filters`, and nothing is sorted. In the
order of falling logits, equal ones by rising id, each filter keeps a prefix; a prefix is a
threshold and a number of ids at the threshold, and both are found by searching the bits of
the logits, several candidates per pass over the row. One program per row reads it about ten
times, mostly from cache, where a sort of the vocabulary would move it many times more.

Every sum is taken in one fixed order, so a row's token does not depend on the other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker import chance
from worker.ops.draws import Draws

_WIDTH = 2048


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Draws:
    """Choose one token per row without waiting for the device.

    A row whose temperature is 0 or whose logits are all -inf gets its most probable token, of
    equal ones the lowest id. Weights are float32 and sums float64, so a token may differ from
    the CPU's where the drawn number lies within about 1e-6 of the border between two.

    Shapes (R rows, V ids):
        logits: [R, V] float32, contiguous in V
        temperature: [R] float32, 0 or at least `scheduler.sampling.GREEDY_BELOW`
        top_k: [R] int64, at least 1; V or more keeps all
        top_p: [R] float64 in (0, 1]
        min_p: [R] float64 in [0, 1]
        seed: [R] int64
        position: [R] int64, of the token to be drawn

    Source: a search for the threshold instead of a sort, "Sorting-Free GPU Kernels for LLM
    Sampling" (FlashInfer, 2025); the numbers, `worker.chance`.
    """
    num_rows, vocab_size = logits.shape
    token = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    (first_shift, first_factor), (second_shift, second_factor) = chance.MIX
    draw_kernel[(num_rows,)](
        token,
        best,
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        position,
        logits.stride(0),
        vocab_size,
        STEP=chance.STEP,
        FIRST_SHIFT=first_shift,
        FIRST_FACTOR=first_factor,
        SECOND_SHIFT=second_shift,
        SECOND_FACTOR=second_factor,
        LAST_SHIFT=chance.LAST_SHIFT,
        UNIT=2.0**-53,
        NOTHING=-(2**31),
        ALL=2**31 - 1,
        WIDTH=min(_WIDTH, triton.next_power_of_2(vocab_size)),
        num_warps=8,
        enable_fp_fusion=False,
    )
    return Draws(token, best)


@triton.jit
def draw_kernel(
    token_out,
    best_out,
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    stride,
    vocab_size,
    STEP: tl.constexpr,
    FIRST_SHIFT: tl.constexpr,
    FIRST_FACTOR: tl.constexpr,
    SECOND_SHIFT: tl.constexpr,
    SECOND_FACTOR: tl.constexpr,
    LAST_SHIFT: tl.constexpr,
    UNIT: tl.constexpr,
    NOTHING: tl.constexpr,
    ALL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    best, has_nan, token = _leader(row, vocab_size, WIDTH)
    tl.store(best_out + index, tl.where(has_nan > 0, float("nan"), best))
    heat = tl.load(temperature + index)
    if (heat > 0.0) & (best > float("-inf")) & (has_nan == 0):
        sharp = 1.0 / heat
        most = tl.load(top_k + index)
        share = tl.load(top_p + index)
        least = tl.load(min_p + index)
        floor = tl.cast(NOTHING, tl.int64)
        ties = tl.cast(ALL, tl.int32)
        if (most < vocab_size) | (share < 1.0) | (least > 0.0):
            floor, ties = _threshold(row, vocab_size, best, sharp, most, share, least, ALL, WIDTH)
        start = _mixed(
            tl.load(seed + index).to(tl.uint64),
            FIRST_SHIFT,
            FIRST_FACTOR,
            SECOND_SHIFT,
            SECOND_FACTOR,
            LAST_SHIFT,
        )
        steps = (tl.load(position + index) + 1).to(tl.uint64)
        bits = _mixed(
            start + steps * STEP,
            FIRST_SHIFT,
            FIRST_FACTOR,
            SECOND_SHIFT,
            SECOND_FACTOR,
            LAST_SHIFT,
        )
        number = (bits >> 11).to(tl.float64) * UNIT
        token = _first_above(row, vocab_size, best, sharp, floor, ties, number, ALL, WIDTH)
    tl.store(token_out + index, token.to(tl.int64))


@triton.jit
def _mixed(
    value,
    FIRST_SHIFT: tl.constexpr,
    FIRST_FACTOR: tl.constexpr,
    SECOND_SHIFT: tl.constexpr,
    SECOND_FACTOR: tl.constexpr,
    LAST_SHIFT: tl.constexpr,
):
    """`worker.chance.mixed`, in uint64."""
    value = (value ^ (value >> FIRST_SHIFT)) * FIRST_FACTOR
    value = (value ^ (value >> SECOND_SHIFT)) * SECOND_FACTOR
    return value ^ (value >> LAST_SHIFT)


@triton.jit
def _leader(row, vocab_size, WIDTH: tl.constexpr):
    """The largest logit, whether any is NaN, and the lowest id of the largest."""
    lane = tl.arange(0, WIDTH)
    best = float("-inf")
    has_nan = 0
    token = 0
    for start in range(0, vocab_size, WIDTH):
        logit = tl.load(row + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
        is_nan = logit != logit
        has_nan = tl.maximum(has_nan, tl.max(is_nan.to(tl.int32), 0))
        sound = tl.where(is_nan, float("-inf"), logit)
        here = tl.max(sound, 0)
        place = tl.min(tl.where(sound == here, lane, WIDTH), 0)
        token = tl.where(here > best, start + place, token)
        best = tl.maximum(best, here)
    return best, has_nan, token


@triton.jit
def _ordered(logit):
    """int32 keys that compare as the logits do; -0 and 0 are the same."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _read(row, start, vocab_size, best, sharp, WIDTH: tl.constexpr):
    """WIDTH logits from `start` on: whether each exists, its key and its weight."""
    place = start + tl.arange(0, WIDTH)
    is_real = place < vocab_size
    logit = tl.load(row + place, mask=is_real, other=float("-inf"))
    weight = tl.exp((logit - best) * sharp)
    return is_real, _ordered(logit), weight


@triton.jit
def _threshold(
    row,
    vocab_size,
    best,
    sharp,
    top_k,
    top_p,
    min_p,
    ALL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Which ids stay: those with keys above `floor`, and the first `ties` of those at it."""
    zero = min_p * 0.0  # float64, as all masses
    top = _ordered(best).to(tl.int64) + 1
    # min_p: the weight of the most probable token is 1. What weighs 0 counts for no top_k.
    floor = top
    count = 0
    mass = zero
    for start in range(0, vocab_size, WIDTH):
        is_real, key, weight = _read(row, start, vocab_size, best, sharp, WIDTH)
        stays = is_real & (weight >= min_p) & (weight > 0.0)
        floor = tl.minimum(floor, tl.min(tl.where(stays, key, ALL), 0).to(tl.int64))
        count += tl.sum(stays.to(tl.int32), 0)
        mass += tl.sum(tl.where(stays, weight, 0.0), 0).to(tl.float64)
    ties = count * 0 + ALL

    if top_k < count:
        wanted = top_k.to(tl.int32)
        floor, low_count, low_mass, high_count, high_mass = _search(
            row, vocab_size, best, sharp, floor, top, count, mass, wanted, zero, False, WIDTH
        )
        is_exact = low_count == wanted
        ties = tl.where(is_exact, ALL, wanted - high_count)
        at_floor = ties.to(tl.float64) * _weight_of(floor, best, sharp)
        mass = tl.where(is_exact, low_mass, high_mass + at_floor)
        count = wanted

    if top_p < 1.0:
        share = top_p * mass
        nucleus, low_count, low_mass, high_count, high_mass = _search(
            row, vocab_size, best, sharp, floor, top, count, mass, count, share, True, WIDTH
        )
        weight = _weight_of(nucleus, best, sharp)
        needed = tl.ceil((share - high_mass) / tl.where(weight > 0.0, weight, 1.0))
        needed = tl.minimum(tl.maximum(needed, 1.0), 1.0 * vocab_size).to(tl.int32)
        needed = tl.where(low_count - high_count == 1, ALL, needed)
        ties = tl.where(nucleus == floor, tl.minimum(ties, needed), needed)
        floor = nucleus
    return floor, ties


@triton.jit
def _weight_of(key, best, sharp):
    """The weight of a logit, by its key, in float64."""
    bits = key.to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.exp((bits.to(tl.float32, bitcast=True) - best) * sharp).to(tl.float64)


@triton.jit
def _search(
    row,
    vocab_size,
    best,
    sharp,
    low,
    high,
    low_count,
    low_mass,
    wanted_count,
    wanted_mass,
    BY_MASS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Narrow [low, high) until the ids with keys in it are told apart no further.

    From `low` on there is enough (ids, or their mass), from `high` on there is not. Four keys
    between them are tried in a pass: 14 passes at most for all 2**32 keys, and about half as
    many where the search may stop early, because exactly enough ids lie from `low` on, or only
    one id is left in question.

    Returns:
        low, and the ids and their mass from `low` on and from `high` on.
    """
    high_count = low_count * 0
    high_mass = low_mass * 0.0
    is_open = high - low > 1
    while is_open:
        tried = low + (high - low) * (1 + tl.arange(0, 4)) // 5
        counts = tl.zeros([4], dtype=tl.int32)
        masses = tl.zeros([4], dtype=tl.float64)
        for start in range(0, vocab_size, WIDTH):
            is_real, key, weight = _read(row, start, vocab_size, best, sharp, WIDTH)
            above = is_real[None, :] & (key[None, :] >= tried[:, None])
            counts += tl.sum(above.to(tl.int32), 1)
            masses += tl.sum(tl.where(above, weight[None, :], 0.0), 1).to(tl.float64)
        enough = masses >= wanted_mass if BY_MASS else counts >= wanted_count
        # Counts and masses fall as keys rise, so the last with enough has the least of those.
        low = tl.maximum(low, tl.max(tl.where(enough, tried, low), 0))
        low_count = tl.minimum(low_count, tl.min(tl.where(enough, counts, low_count), 0))
        low_mass = tl.minimum(low_mass, tl.min(tl.where(enough, masses, low_mass), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, tried), 0))
        high_count = tl.maximum(high_count, tl.max(tl.where(enough, high_count, counts), 0))
        high_mass = tl.maximum(high_mass, tl.max(tl.where(enough, high_mass, masses), 0))
        if BY_MASS:
            is_open = (high - low > 1) & (low_count - high_count > 1)
        else:
            is_open = (high - low > 1) & (low_count != wanted_count)
    return low, low_count, low_mass, high_count, high_mass


@triton.jit
def _first_above(
    row,
    vocab_size,
    best,
    sharp,
    floor,
    ties,
    number,
    ALL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The first id whose running sum over what stays exceeds `number` times the whole sum."""
    lane = tl.arange(0, WIDTH)
    at = floor.to(tl.int32)
    total = number * 0.0
    num_ties = 0
    for start in range(0, vocab_size, WIDTH):
        weight, num_ties = _staying(
            row, start, vocab_size, best, sharp, at, ties, num_ties, ALL, WIDTH
        )
        total += tl.sum(weight, 0).to(tl.float64)
    goal = number * total
    running = number * 0.0
    num_ties = 0
    found = -1
    last = 0
    for start in range(0, vocab_size, WIDTH):
        weight, num_ties = _staying(
            row, start, vocab_size, best, sharp, at, ties, num_ties, ALL, WIDTH
        )
        after = running + tl.sum(weight, 0).to(tl.float64)
        final = tl.max(tl.where(weight > 0.0, start + lane, -1), 0)
        last = tl.maximum(last, final)
        if (found < 0) & (after > goal):
            sums = running + tl.cumsum(weight.to(tl.float64), 0)
            is_hit = (weight > 0.0) & (sums > goal)
            # Rounded differently, the last running sum may miss what the whole sum reaches.
            found = tl.min(tl.where(is_hit, start + lane, final), 0)
        running = after
    return tl.where(found < 0, last, found)


@triton.jit
def _staying(
    row,
    start,
    vocab_size,
    best,
    sharp,
    at,
    ties,
    num_ties,
    ALL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """WIDTH weights from `start` on, 0 for ids that do not stay; and the ties up to here."""
    is_real, key, weight = _read(row, start, vocab_size, best, sharp, WIDTH)
    stays = is_real & (key >= at)
    if ties < ALL:
        is_tie = (is_real & (key == at)).to(tl.int32)
        rank = num_ties + tl.cumsum(is_tie, 0) - is_tie
        stays = stays & ((key > at) | (rank < ties))
        num_ties += tl.sum(is_tie, 0)
    return tl.where(stays, weight, 0.0), num_ties
