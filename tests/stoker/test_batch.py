"""A batch keeps within what the engine takes, and forgets nothing."""

import random

from cluster.frontend.errors import QueueFull
from stoker.batch import BatchQueue


def take_all(queue: BatchQueue, now_s: float = 0.0) -> list[int]:
    taken: list[int] = []
    while (index := queue.next_index(now_s)) is not None:
        taken.append(index)
    return taken


def full(retry_after_s: float | None = None) -> QueueFull:
    return QueueFull("full", retry_after_s=retry_after_s)


def test_everything_goes_in_at_once_where_there_is_room() -> None:
    queue = BatchQueue(3)

    assert take_all(queue) == [0, 1, 2]
    assert queue.wait_s(0.0) is None
    for index in (2, 0, 1):
        assert not queue.is_done
        queue.note_answer(index)
    assert queue.is_done


def test_an_empty_batch_is_done() -> None:
    assert BatchQueue(0).is_done


def test_refused_requests_come_again_in_their_order_once_there_is_room() -> None:
    queue = BatchQueue(5)
    take_all(queue)

    for index in (2, 3, 4):
        queue.note_full(index, full(), 0.0)

    assert take_all(queue) == []
    queue.note_answer(0)
    assert take_all(queue) == [2]
    queue.note_answer(1)
    assert take_all(queue)[:1] == [3]


def test_where_others_fill_the_queue_the_engines_advice_is_kept() -> None:
    queue = BatchQueue(1)
    take_all(queue)

    queue.note_full(0, full(2.0), 10.0)

    assert queue.wait_s(10.5) == 1.5
    assert take_all(queue, 11.0) == []
    assert take_all(queue, 12.0) == [0]


def test_any_mix_of_refusals_and_answers_answers_each_request_once() -> None:
    chance = random.Random(5)
    for _ in range(50):
        count, room = chance.randint(1, 60), chance.randint(1, 8)
        queue, now_s, in_flight, answered = BatchQueue(count), 0.0, set[int](), []
        while not queue.is_done:
            for index in take_all(queue, now_s):
                if len(in_flight) < room and chance.random() < 0.9:
                    in_flight.add(index)
                else:
                    queue.note_full(index, full(1.0), now_s)
            if in_flight and chance.random() < 0.7:
                index = chance.choice(sorted(in_flight))
                in_flight.remove(index)
                answered.append(index)
                queue.note_answer(index)
            now_s += 1.0
        assert sorted(answered) == list(range(count))
