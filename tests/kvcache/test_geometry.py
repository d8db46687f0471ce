"""Bytes per block and blocks in a budget."""

import pytest

from kvcache.geometry import KVGeometry, blocks_for


def make_geometry(**changes: int) -> KVGeometry:
    smollm2 = {
        "num_layers": 30,
        "num_kv_heads": 3,
        "head_bytes": 64 * 4,
        "block_size": 16,
    }
    return KVGeometry(**{**smollm2, **changes})


def test_a_token_of_smollm2_takes_46080_bytes_in_float32() -> None:
    assert make_geometry().token_bytes == 46_080
    assert make_geometry().block_bytes == 720 * 1024


def test_a_16_bit_type_halves_a_block() -> None:
    assert 2 * make_geometry(head_bytes=64 * 2).block_bytes == make_geometry().block_bytes


def test_a_budget_holds_whole_blocks_only() -> None:
    geometry = make_geometry()

    assert geometry.blocks_in(3 * geometry.block_bytes) == 3
    assert geometry.blocks_in(3 * geometry.block_bytes - 1) == 2
    assert geometry.blocks_in(geometry.block_bytes - 1) == 0
    assert geometry.blocks_in(-1) == 0


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_a_sequence_takes_its_last_block_whole(tokens: int, blocks: int) -> None:
    geometry = make_geometry()

    assert blocks_for(tokens, 16) == blocks
    assert geometry.blocks_for(tokens) == blocks
    assert geometry.blocks_in(geometry.bytes_for(tokens)) == blocks


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_bytes", "block_size"])
def test_a_geometry_without_room_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        make_geometry(**{name: 0})
