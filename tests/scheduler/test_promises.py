"""Times dealt out to refused requests."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from scheduler.promises import EARLY_S, HORIZON_S, LATE_S, Promises, fingerprint
from tests.scheduler.builders import make_request


def key(number: int) -> bytes:
    return number.to_bytes(4)


@pytest.mark.parametrize(("rate", "burst"), [(0.3, 0.0), (2.5, 4.0), (40.0, 100.0)])
def test_no_more_come_back_than_places_become_free(rate: float, burst: float) -> None:
    promises = Promises()
    told = [promises.make(key(i), 100.3, soonest_s=0.0, rate=rate, burst=burst) for i in range(100)]

    for begin in range(1, max(told)):
        in_ten_s = sum(begin <= seconds < begin + 10 for seconds in told)
        assert in_ten_s <= 10 * rate + 1
    assert max(told) == pytest.approx(100 / rate, rel=0.3, abs=1.0)


def test_who_cannot_wait_for_others_comes_back_alone() -> None:
    promises = Promises()
    told = [promises.make(key(i), 100.3, soonest_s=0.0, rate=2.5) for i in range(50)]

    assert max(Counter(told).values()) == 1


def test_those_who_came_at_other_parts_of_a_second_fill_the_gaps() -> None:
    rng = random.Random(1)
    promises = Promises()
    moments = sorted(100.0 + rng.random() for _ in range(60))
    when = sorted(
        now + promises.make(key(i), now, soonest_s=0.0, rate=2.0) for i, now in enumerate(moments)
    )

    assert min(b - a for a, b in pairwise(when)) > 0.15
    assert when[-1] - 100.0 < 60 / 2.0 * 1.6


def test_outputs_of_one_call_come_back_together_and_count_each() -> None:
    promises = Promises()
    told = [promises.make(key(1), 5.0, soonest_s=0.0, rate=2.0) for _ in range(3)]

    assert told == [1, 1, 1]
    assert len(promises) == 3
    for _ in range(3):
        assert promises.is_expected(key(1), 6.0)
        promises.keep(key(1))
    assert not promises.is_expected(key(1), 6.0)


def test_somebody_is_expected_at_the_time_and_neither_long_before_nor_after() -> None:
    promises = Promises()
    when = 10.0 + promises.make(key(1), 10.0, soonest_s=4.5, rate=2.0)

    assert when == 15.0
    assert not promises.is_expected(key(1), when - 2 * EARLY_S)
    assert promises.is_expected(key(1), when - EARLY_S / 2)
    promises.forget_missed(when + LATE_S - 0.1)
    assert promises.is_expected(key(1), when + LATE_S - 0.1)
    promises.forget_missed(when + LATE_S + 0.1)
    assert not promises.is_expected(key(1), when + LATE_S + 0.1)
    assert len(promises) == 0


def test_beyond_the_horizon_nothing_is_promised() -> None:
    promises = Promises()
    told = [promises.make(key(i), 3.0, soonest_s=0.0, rate=0.1) for i in range(200)]

    assert told[-1] == HORIZON_S
    assert len(promises) < 100


def test_times_are_overbooked_by_the_share_that_does_not_come() -> None:
    promises = Promises()
    for i in range(200):
        now = float(i)
        promises.forget_missed(now)
        promises.make(key(i), now, soonest_s=0.0, rate=10.0)
        if i % 4 == 0:
            promises.keep(key(i))

    assert promises.share_kept == pytest.approx(0.25, abs=0.1)
    before = len(promises)
    told = [
        promises.make(key(1000 + i), 200.0, soonest_s=0.0, rate=1.0, burst=9.0) for i in range(80)
    ]
    assert len(promises) == before + 80
    assert max(told) < 40


def test_only_the_same_request_is_taken_for_the_same() -> None:
    one = fingerprint(make_request(1, prompt=[1, 2, 3]))

    assert one == fingerprint(make_request(2, prompt=[1, 2, 3]))
    assert one != fingerprint(make_request(1, prompt=[1, 2, 4]))
    assert one != fingerprint(make_request(1, prompt=[1, 2, 3], max_tokens=9))
    assert one != fingerprint(make_request(1, prompt=[1, 2, 3], cache_salt="x"))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_the_books_agree(seed: int) -> None:
    rng = random.Random(seed)
    promises, now = Promises(), 0.0
    for _ in range(3000):
        now += rng.random() * 0.2
        promises.forget_missed(now)
        whose = key(rng.randrange(40))
        if promises.is_expected(whose, now) or rng.random() < 0.3:
            promises.keep(whose)
        else:
            told = promises.make(whose, now, soonest_s=rng.random() * 5, rate=3.0)
            assert 1 <= told <= HORIZON_S
        due = promises.next_due_s(now, 1000)
        assert list(due) == sorted(due)
        assert len(due) == len(promises)
    promises.forget_missed(now + HORIZON_S + 10.0)
    assert len(promises) == 0
