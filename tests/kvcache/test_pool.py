import pytest

from kvcache.errors import OutOfBlocks
from kvcache.pool import BlockPool


def is_reusable(block: int) -> bool:
    return True


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        BlockPool(0)


def test_asking_for_more_than_is_idle_takes_nothing_and_says_both_numbers() -> None:
    pool = BlockPool(4)
    pool.take(3)

    with pytest.raises(OutOfBlocks, match="wanted 2 KV blocks, but only 1 of 4 are idle"):
        pool.take(2)

    assert pool.num_idle == 1


def test_a_block_is_idle_again_when_its_last_holder_is_gone() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.share(blocks)
    pool.give_back(blocks, is_reusable)
    assert pool.num_idle == 1

    pool.give_back(blocks, is_reusable)

    assert pool.num_idle == 2


def test_the_tail_of_a_chain_is_reused_before_its_start_and_older_chains_before_newer() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2), pool.take(2)
    pool.give_back(first, is_reusable)
    pool.give_back(second, is_reusable)

    assert pool.take(4) == [first[1], first[0], second[1], second[0]]


def test_blocks_that_hold_nothing_reusable_go_first() -> None:
    pool = BlockPool(4)
    blocks = pool.take(4)

    pool.give_back(blocks, lambda block: block != blocks[3])

    assert pool.take(1) == [blocks[3]]


def test_a_prefix_hit_on_an_idle_block_makes_it_held() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2)
    pool.give_back(blocks, is_reusable)

    pool.share([blocks[0]])

    assert pool.take(1) == [blocks[1]]
    assert pool.holders(blocks[0]) == 1
