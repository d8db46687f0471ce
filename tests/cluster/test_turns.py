"""Suspects have their turns one after the other."""

from pathlib import Path

from cluster.messages.clients import AskTurn, YourTurn
from cluster.turns import Turns
from tests.cluster.cluster_rig import Rig


def make_turns(*asked: tuple[int, int]) -> Turns:
    turns = Turns()
    for client, handle in asked:
        turns.ask(client, handle)
    return turns


def test_the_next_turn_begins_when_the_one_before_is_over() -> None:
    turns = make_turns((1, 5), (2, 5))

    assert turns.begin() == (1, 5)
    assert turns.begin() is None
    turns.over(2, (5,))
    turns.over(1, (6,))
    assert turns.begin() is None
    turns.over(1, (4, 5))
    assert turns.begin() == (2, 5)


def test_a_client_that_leaves_takes_its_turns_along() -> None:
    turns = make_turns((1, 5), (1, 6), (2, 7))

    assert turns.begin() == (1, 5)
    turns.left(1)
    assert turns.begin() == (2, 7)


def test_an_engine_gives_the_next_turn_when_the_request_has_a_token(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        for handle in (1, 2, 3):
            client.send(AskTurn(handle))
        assert client.next() == YourTurn(1)
        assert client.submit(max_tokens=3) == 1
        assert client.next_of(YourTurn) == YourTurn(2)
        assert client.tokens[1]
        client.abort(2)
        assert client.next_of(YourTurn) == YourTurn(3)


def test_an_engine_gives_the_next_turn_when_the_request_is_refused(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        client = rig.client()
        for handle in (1, 2):
            client.send(AskTurn(handle))
        client.next_of(YourTurn)
        client.submit(num_prompt=1000)
        assert client.next_of(YourTurn) == YourTurn(2)
        assert client.rejections[1].reason == "too_long"


def test_who_leaves_holds_nobody_up(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        gone, client = rig.client(), rig.client()
        gone.send(AskTurn(1))
        gone.next_of(YourTurn)
        client.send(AskTurn(1))
        gone.close()
        assert client.next_of(YourTurn) == YourTurn(1)
