"""The mirror of the slot table, and the flat tensors of a step."""

from collections.abc import Callable

import numpy as np
import pytest

from scheduler.arrays import int32
from scheduler.plan import Admission, StepPlan
from scheduler.sampling import SamplingParams
from worker.batch import Slices, SlotTable
from worker.errors import ProtocolError

GREEDY = SamplingParams(temperature=0.0, seed=0)
BLOCK_SIZE = 4


def make_table(**changes: int) -> SlotTable:
    settings = {"max_num_seqs": 4, "max_model_len": 32, "block_size": BLOCK_SIZE, "num_blocks": 20}
    return SlotTable(**{**settings, **changes})


def admission(slot: int, blocks: list[int], **changes: object) -> Admission:
    settings: dict[str, object] = {"num_prompt": 5, **changes}
    return Admission(slot=slot, sampling=GREEDY, blocks=int32(blocks), **settings)  # type: ignore[arg-type]


def plan(step: int = 1, epoch: int = 1, **columns: object) -> StepPlan:
    made = {
        name: int32(value) if isinstance(value, list) else value for name, value in columns.items()
    }
    if isinstance(made.get("samples"), tuple):
        made["samples"] = np.array(made["samples"], dtype=np.bool_)
    return StepPlan(epoch=epoch, step=step, **made)  # type: ignore[arg-type]  # a test's own columns


def begun() -> SlotTable:
    """Slot 2 holds a prompt of 5 tokens, all computed, and 70 was sampled."""
    table = make_table()
    slices = table.apply(
        plan(
            admitted=(admission(2, [7, 9]),),
            slot=[2],
            start=[0],
            count=[5],
            given=[5],
            token=[10, 11, 12, 13, 14],
        )
    )
    table.record(table.expect(slices), np.array([70]))
    return table


def test_a_prompt_becomes_flat_tensors() -> None:
    table = make_table()
    slices = table.apply(
        plan(
            admitted=(admission(2, [7, 9]), admission(0, [3])),
            slot=[2, 0],
            start=[0, 0],
            count=[5, 2],
            given=[5, 2],
            token=[10, 11, 12, 13, 14, 20, 21],
            samples=(True, False),
        )
    )

    batch = table.inputs(slices)

    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.cells.tolist() == [28, 29, 30, 31, 36, 12, 13]
    assert batch.slice_offsets.tolist() == [0, 5, 7]
    assert batch.context_lens.tolist() == [5, 2]
    assert batch.block_tables[0].tolist() == [7, 9]
    assert batch.block_tables[1, 0] == 3
    assert (batch.max_slice_len, batch.max_context_len) == (5, 5)


def test_a_decode_takes_the_token_sampled_last_without_being_told() -> None:
    table = begun()

    slices = table.apply(plan(step=2, slot=[2], start=[5]))
    batch = table.inputs(slices)

    assert batch.token_ids.tolist() == [70]
    assert batch.positions.tolist() == [5]
    assert batch.cells.tolist() == [37]
    assert slices.samples.tolist() == [True]


def test_new_blocks_are_appended_in_order_also_several_to_one_slot() -> None:
    table = begun()

    table.apply(plan(step=2, block_slot=[2, 2, 2], block=[4, 1, 6]))

    assert table.blocks.of(2).tolist() == [7, 9, 4, 1, 6]


def test_blocks_of_several_slots_may_be_mixed() -> None:
    table = begun()
    table.apply(plan(step=2, admitted=(admission(1, [0]),)))

    table.apply(plan(step=3, block_slot=[2, 1, 2], block=[4, 5, 6]))

    assert table.blocks.of(2).tolist() == [7, 9, 4, 6]
    assert table.blocks.of(1).tolist() == [0, 5]


def test_a_slot_can_be_released_and_admitted_in_one_plan() -> None:
    table = begun()

    slices = table.apply(
        plan(
            step=2,
            released=[2],
            admitted=(admission(2, [1, 3], num_cached=4, history=int32([1, 2, 3, 4])),),
            slot=[2],
            start=[4],
            count=[1],
            given=[1],
            token=[99],
        )
    )

    assert table.inputs(slices).token_ids.tolist() == [99]
    assert table.tokens[2, :5].tolist() == [1, 2, 3, 4, 99]
    assert table.num_held == 1


def test_a_slice_may_end_with_the_sampled_token() -> None:
    table = begun()

    # As a speculative or resumed slice: two tokens given, of which the log held the first.
    slices = table.apply(
        plan(step=2, slot=[2], start=[5], count=[2], given=[2], token=[70, 71], samples=(True,))
    )
    table.record(table.expect(slices), np.array([72]))
    following = table.apply(plan(step=3, slot=[2], start=[7]))

    assert table.inputs(following).token_ids.tolist() == [72]


def test_sampling_at_the_end_of_the_context_has_room_for_its_token() -> None:
    table = make_table(max_model_len=4)
    slices = table.apply(
        plan(
            admitted=(admission(0, [1]),),
            slot=[0],
            start=[0],
            count=[4],
            given=[4],
            token=[1, 2, 3, 4],
        )
    )
    table.record(table.expect(slices), np.array([5]))

    assert table.tokens[0].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: plan(step=3, slot=[2], start=[5]), "step 3 came after step 1"),
        (lambda: plan(step=1, slot=[2], start=[5]), "step 1 came after step 1"),
        (lambda: plan(step=2, epoch=7), "epoch 7 came in epoch 1"),
        (lambda: plan(step=2, slot=[2], start=[6]), "slot 2 start 6; the mirror has 5"),
        (lambda: plan(step=2, slot=[1], start=[0]), "slot 1 sliced, which holds no sequence"),
        (lambda: plan(step=2, slot=[-1], start=[0]), "slot -1 sliced"),
        (lambda: plan(step=2, slot=[4], start=[0]), "slot 4 sliced; there are slots 0 to 3"),
        (lambda: plan(step=2, slot=[2, 2], start=[5, 5]), "two slices of one slot"),
        (lambda: plan(step=2, slot=[2], start=[5, 6]), "1 slices, but columns of"),
        (lambda: plan(step=2, slot=[2], start=[5], count=[0]), "slice length 0"),
        (
            lambda: plan(step=2, slot=[2], start=[5], count=[4], given=[4], token=[70, 1, 2, 3]),
            "end of slice 9; the mirror has 8",
        ),
        (
            lambda: plan(step=2, slot=[2], start=[5], count=[3], given=[1], token=[70]),
            "given tokens 1",
        ),
        (
            lambda: plan(step=2, slot=[2], start=[5], count=[2], given=[1], token=[70]),
            "end of a slice of known tokens 7; the mirror has 6",
        ),
        (
            lambda: plan(step=2, slot=[2], start=[5], given=[1], token=[70, 71]),
            "gives 2 tokens; its slices name 1",
        ),
        (lambda: plan(step=2, released=[0]), "slot 0 released, which holds no sequence"),
        (lambda: plan(step=2, admitted=(admission(2, [1]),)), "admits slot 2, which is held"),
        (lambda: plan(step=2, admitted=(admission(4, [1]),)), "there are slots 0 to 3"),
        (lambda: plan(step=2, admitted=(admission(0, [20]),)), "block 20; the pool has 0 to 19"),
        (lambda: plan(step=2, admitted=(admission(0, [-1]),)), "block -1"),
        (lambda: plan(step=2, admitted=(admission(0, list(range(9))),)), "9 blocks; 8 hold"),
        (
            lambda: plan(step=2, admitted=(admission(0, [1], num_cached=5),)),
            "5 tokens of slot 0 are cached, but gives 1 blocks of 4",
        ),
        (
            lambda: plan(step=2, admitted=(admission(0, [1], num_cached=4, history=int32([1])),)),
            "history of 1 tokens, wanted none or its 4",
        ),
        (lambda: plan(step=2, block_slot=[0], block=[1]), "slot 0 given blocks, which holds no"),
        (lambda: plan(step=2, block_slot=[2], block=[20]), "block 20"),
        (lambda: plan(step=2, block_slot=[2], block=[]), "1 block slots, but 0 blocks"),
        (lambda: plan(step=2, block_slot=[2] * 7, block=[1] * 7), "more than the 8 blocks"),
    ],
)
def test_a_plan_that_does_not_fit_the_mirror_is_refused_with_both_numbers(
    made: Callable[[], StepPlan], words: str
) -> None:
    with pytest.raises(ProtocolError, match=words):
        begun().apply(made())


def test_columns_that_are_read_only_are_only_read() -> None:
    def frozen(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.frombuffer(int32(values).tobytes(), dtype=np.int32)

    table = begun()
    slices = table.apply(
        plan(step=2, slot=frozen([2]), start=frozen([5]), count=frozen([1]), given=frozen([0]))
    )
    batch = table.inputs(slices)
    batch.context_lens.add_(1)  # a set of operations owns the tensors it is given

    assert batch.context_lens.tolist() == [7]


def test_a_large_random_run_matches_a_plain_list_of_tokens() -> None:
    rng = np.random.default_rng(0)
    table = make_table(max_num_seqs=40, max_model_len=64, num_blocks=700)
    texts: dict[int, list[int]] = {}
    computed = dict.fromkeys(range(40), 0)
    for step in range(1, 30):
        fresh = [slot for slot in range(40) if slot not in texts and rng.random() < 0.3]
        admitted = tuple(admission(slot, list(range(slot * 17, slot * 17 + 16))) for slot in fresh)
        for slot in fresh:
            texts[slot] = rng.integers(0, 1000, 20).tolist()
        slots = [slot for slot in texts if rng.random() < 0.7 and computed[slot] < 60]
        starts = [computed[slot] for slot in slots]
        counts = [min(7, len(texts[slot]) - computed[slot]) for slot in slots]
        given = [
            max(0, min(start + count, 20) - start)
            for start, count in zip(starts, counts, strict=True)
        ]
        tokens = [
            texts[slot][start : start + own]
            for slot, start, own in zip(slots, starts, given, strict=True)
        ]
        slices = table.apply(
            plan(
                step=step,
                admitted=admitted,
                slot=slots,
                start=starts,
                count=counts,
                given=given,
                token=[token for part in tokens for token in part],
                samples=tuple(
                    start + count == len(texts[slot])
                    for slot, start, count in zip(slots, starts, counts, strict=True)
                ),
            )
        )
        if not slots:
            continue
        expected = [
            texts[slot][start : start + count]
            for slot, start, count in zip(slots, starts, counts, strict=True)
        ]
        batch = table.inputs(slices)
        assert batch.token_ids.tolist() == [token for part in expected for token in part]
        own_cells = np.concatenate(
            [
                slot * 17 * BLOCK_SIZE + np.arange(start, start + count)
                for slot, start, count in zip(slots, starts, counts, strict=True)
            ]
        )
        assert batch.cells.tolist() == own_cells.tolist()
        sampled = rng.integers(0, 1000, int(slices.samples.sum()))
        table.record(table.expect(slices), sampled)
        append_sampled(texts, slices, sampled.tolist())
        computed.update(zip(slots, slices.stop.tolist(), strict=True))


def append_sampled(texts: dict[int, list[int]], slices: Slices, sampled: list[int]) -> None:
    for slot, token in zip(slices.slot[slices.samples].tolist(), sampled, strict=True):
        texts[slot].append(token)
