"""Who fills a copy of weights, who gets it, and when it is dropped: every order of a small case."""

import random

import pytest

from cluster.weight_copies import CopyName, Drop, Give, Instruction, LetFill, WeightCopies

OLD, NEW = CopyName("rank 0 of 2", "old"), CopyName("rank 0 of 2", "new")
OTHER = CopyName("rank 1 of 2", "old")


@pytest.fixture
def copies() -> WeightCopies:
    return WeightCopies()


def test_who_asks_first_fills_and_who_asks_then_waits_for_it(copies: WeightCopies) -> None:
    assert copies.ask(1, OLD) == [LetFill(1)]
    assert copies.ask(2, OLD) == []
    assert copies.ask(3, OTHER) == [LetFill(3)]

    assert copies.filled(1) == (OLD, [Give(2, OLD)])
    assert copies.ask(4, OLD) == [Give(4, OLD)]


def test_when_a_filler_is_gone_the_next_one_fills(copies: WeightCopies) -> None:
    copies.ask(1, OLD)
    copies.ask(2, OLD)
    copies.ask(3, OLD)

    assert copies.gone(1) == [LetFill(2)]
    assert copies.gone(3) == []
    assert copies.filled(2) == (OLD, [])


def test_a_copy_that_nobody_filled_leaves_nothing(copies: WeightCopies) -> None:
    copies.ask(1, OLD)
    copies.gone(1)

    assert copies.whole == frozenset()
    assert copies.ask(2, OLD) == [LetFill(2)]


def test_a_copy_waits_for_the_successors_of_those_who_used_it(copies: WeightCopies) -> None:
    copies.ask(1, OLD)
    copies.filled(1)

    assert copies.gone(1) == []
    assert copies.ask(2, OLD) == [Give(2, OLD)]


def test_an_old_version_goes_when_a_new_one_is_there_and_its_last_user_is_not(
    copies: WeightCopies,
) -> None:
    for peer, name in ((1, OLD), (2, OLD), (3, OTHER)):
        copies.ask(peer, name)
    copies.filled(1)
    copies.filled(3)
    copies.gone(1)
    copies.ask(4, NEW)

    assert copies.filled(4) == (NEW, [])  # the second user still has the old one
    assert copies.gone(2) == [Drop(OLD)]
    assert copies.whole == {NEW, OTHER}


def test_an_old_version_that_is_idle_goes_as_soon_as_a_new_one_is_whole(
    copies: WeightCopies,
) -> None:
    copies.ask(1, OLD)
    copies.filled(1)
    copies.gone(1)
    copies.ask(2, NEW)

    assert copies.filled(2) == (NEW, [Drop(OLD)])


@pytest.mark.parametrize("seed", range(200))
def test_in_any_order_of_asking_filling_and_dying_nobody_waits_in_vain(seed: int) -> None:
    chance = random.Random(seed)
    copies = WeightCopies()
    waits: dict[int, CopyName] = {}
    fills: dict[int, CopyName] = {}
    uses: dict[int, CopyName] = {}
    held: set[CopyName] = set()

    def follow(instructions: list[Instruction]) -> None:
        for one in instructions:
            match one:
                case LetFill(peer=peer):
                    fills[peer] = waits.pop(peer)
                case Give(peer=peer, name=name):
                    assert name in held
                    assert waits.pop(peer) == name
                    uses[peer] = name
                case Drop(name=name):
                    assert name not in uses.values()
                    held.remove(name)

    for peer in range(60):
        do = chance.random()
        if do < 0.5:
            waits[peer] = chance.choice((OLD, NEW, OTHER))
            follow(copies.ask(peer, waits[peer]))
        elif do < 0.7 and fills:
            filler = chance.choice(sorted(fills))
            uses[filler] = fills.pop(filler)
            held.add(uses[filler])
            name, then = copies.filled(filler)
            assert name == uses[filler]
            follow(then)
        elif gone := sorted({**waits, **fills, **uses}):
            leaver = chance.choice(gone)
            for state in (waits, fills, uses):
                state.pop(leaver, None)
            follow(copies.gone(leaver))
        assert copies.whole == held
        assert set(waits.values()) <= set(fills.values()), "somebody waits, and nobody fills"
        assert len(fills) == len(set(fills.values())), "two fill the same"
        assert not set(fills.values()) & held
        assert len({name.part for name in held if name not in uses.values()}) == sum(
            name not in uses.values() for name in held
        ), "two idle versions of one part"
