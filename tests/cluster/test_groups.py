"""The life of a worker group: every order of events, and the orders that matter by name."""

import copy
import itertools
from collections.abc import Callable, Iterable

from cluster.group_instructions import Instruction, LetLoad, Lose, Refuse, Serve, SizePool, Start
from cluster.groups import EXPLANATION_S, RestartPolicy, WorkerGroup
from cluster.messages.workers import NodeFacts, RankCapacity, RankPhase, WorkerGreeting, WorkerHello

FOREVER = RestartPolicy(max_restarts=1_000)


def make_group(
    num_ranks: int = 2, policy: RestartPolicy | None = None, start_timeout_s: float = 60.0
) -> WorkerGroup:
    return WorkerGroup(
        0,
        num_ranks,
        start_timeout_s=start_timeout_s,
        policy=policy if policy is not None else RestartPolicy(),
        now=0.0,
    )


def make_hello(
    rank: int, *, epoch: int = 1, num_blocks: int = 10, vocab_size: int = 100
) -> WorkerHello:
    return WorkerHello(
        protocol=1,
        engine_id="e",
        key="k",
        group=0,
        epoch=epoch,
        rank=rank,
        capacity=RankCapacity(
            num_blocks=num_blocks, block_bytes=1, vocab_size=vocab_size, max_model_len=64
        ),
    )


def make_greeting(rank: int, *, epoch: int = 1, node: str = "n1") -> WorkerGreeting:
    return WorkerGreeting(
        protocol=1,
        engine_id="e",
        key="k",
        group=0,
        epoch=epoch,
        rank=rank,
        facts=NodeFacts(node=node),
    )


def peer(rank: int, epoch: int = 1) -> bytes:
    return f"{epoch}.{rank}".encode()


def bring_up(group: WorkerGroup, now: float = 0.0) -> list[Instruction]:
    given: list[Instruction] = []
    for rank in range(group.num_ranks):
        given += group.hello(peer(rank, group.epoch), make_hello(rank, epoch=group.epoch), now=now)
    for rank in range(group.num_ranks):
        given += group.ready(peer(rank, group.epoch), now=now)
    return given


def test_the_least_capacity_of_the_ranks_is_the_pool_of_all() -> None:
    group = make_group()

    assert group.hello(peer(1), make_hello(1, num_blocks=7), now=0.0) == []
    assert group.hello(peer(0), make_hello(0, num_blocks=9), now=0.0) == [
        SizePool(0, (peer(0), peer(1)), 7)
    ]
    assert group.ready(peer(0), now=0.0) == []
    assert group.ready(peer(1), now=0.0) == [Serve(0, 1, 7)]


def test_ranks_may_load_when_all_are_there_and_alike() -> None:
    group = make_group()

    assert group.greet(peer(1), make_greeting(1), "", now=0.0) == []
    assert group.greet(peer(0), make_greeting(0), "", now=0.0) == [LetLoad(0, (peer(1), peer(0)))]


def test_a_rank_whose_node_differs_loses_the_group_before_anything_is_loaded() -> None:
    group = make_group()
    group.greet(peer(0), make_greeting(0), "", now=0.0)

    (lost,) = group.greet(peer(1), make_greeting(1), "node n2 has torch 1, n1 has 2", now=0.0)

    assert isinstance(lost, Lose)
    assert (lost.rank, lost.message) == (1, "node n2 has torch 1, n1 has 2")


def test_a_greeting_of_another_epoch_is_refused() -> None:
    (refused,) = make_group().greet(peer(0), make_greeting(0, epoch=7), "", now=0.0)
    assert isinstance(refused, Refuse)


def test_a_start_that_takes_too_long_says_which_rank_does_what_and_where() -> None:
    group = make_group(start_timeout_s=60.0)
    group.greet(peer(1), make_greeting(1, node="n2"), "", now=0.0)
    group.moved(RankPhase(group=0, epoch=1, rank=1, phase="load", done=3_000_000, total=9_000_000))

    (lost,) = group.tick(60.0)

    assert isinstance(lost, Lose)
    assert "rank 0 has not reached the engine" in lost.message
    assert "rank 1 on n2 loads weights: 3 of 9 MB read" in lost.message


def test_a_failing_rank_loses_the_group_as_one_and_only_once() -> None:
    group = make_group()
    bring_up(group)

    (lost,) = group.failed(1, 1, "boom", step=5, now=1.0)

    assert isinstance(lost, Lose)
    assert (lost.rank, lost.step, lost.message, lost.was_ready) == (1, 5, "boom", True)
    assert group.failed(1, 0, "its peer is lost", now=1.0) == []


def test_a_lost_group_stays_lost_without_a_restart_policy() -> None:
    group = make_group()
    bring_up(group)
    group.failed(1, 0, "boom", now=1.0)
    assert not group.has_hope

    assert group.stopped(1, now=2.0) == []
    assert group.state == "stopped"
    assert group.next_deadline is None


def test_a_group_that_never_was_ready_is_not_restarted() -> None:
    group = make_group(policy=FOREVER)
    (lost,) = group.failed(1, 0, "no weights", now=1.0)

    assert isinstance(lost, Lose)
    assert not lost.restarts
    group.stopped(1, now=1.0)
    assert group.state == "stopped"


def test_a_restart_waits_for_the_old_processes_and_then_for_a_growing_pause() -> None:
    group = make_group(policy=RestartPolicy(max_restarts=3, first_pause_s=1.0))
    now = 0.0
    for pause_s in (1.0, 2.0, 4.0):
        bring_up(group, now)
        epoch = group.epoch
        group.failed(epoch, 0, "boom", now=now)
        assert group.tick(now + 1000.0) == []
        group.stopped(epoch, now=now)
        assert group.tick(now + pause_s - 0.01) == []
        now += pause_s
        assert group.tick(now) == [Start(0, epoch + 1)]
    bring_up(group, now)
    group.failed(group.epoch, 0, "boom", now=now)
    assert not group.has_hope


def test_a_rank_that_left_is_lost_a_moment_later_if_nobody_says_why() -> None:
    group = make_group()
    bring_up(group)
    assert group.left(peer(1), now=5.0) == []
    assert group.left(b"stranger", now=5.0) == []
    assert group.next_deadline == 5.0 + EXPLANATION_S
    assert group.tick(5.0 + EXPLANATION_S / 2) == []
    (lost,) = group.tick(5.0 + EXPLANATION_S)

    assert isinstance(lost, Lose)
    assert (lost.rank, lost.message) == (1, "its connection ended")
    assert group.next_deadline is None


def test_the_reason_of_a_rank_that_left_is_the_one_that_is_told() -> None:
    group = make_group()
    bring_up(group)
    group.left(peer(1), now=5.0)
    (lost,) = group.failed(1, 1, "killed", now=5.1)

    assert isinstance(lost, Lose)
    assert lost.message == "killed"
    assert group.tick(6.0) == []


def test_the_loss_of_another_rank_waits_for_what_ended_that_one() -> None:
    group = make_group()
    bring_up(group)
    assert group.failed(1, 0, "rank 1 left", reason="cut", step=7, now=5.0) == []
    (lost,) = group.failed(1, 1, "killed", reason="died", now=5.1)

    assert isinstance(lost, Lose)
    assert (lost.rank, lost.message, lost.reason) == (1, "killed", "died")


def test_the_loss_of_another_rank_that_nobody_explains_is_the_reason_itself() -> None:
    group = make_group()
    bring_up(group)
    group.failed(1, 0, "rank 1 left", reason="cut", step=7, now=5.0)
    group.left(peer(1), now=5.1)
    (lost,) = group.tick(5.0 + EXPLANATION_S)

    assert isinstance(lost, Lose)
    assert (lost.rank, lost.step, lost.message, lost.reason) == (0, 7, "rank 1 left", "cut")


def test_long_service_makes_earlier_losses_forgotten() -> None:
    group = make_group(policy=RestartPolicy(max_restarts=1, first_pause_s=1.0, stable_s=60.0))
    now = 0.0
    for _ in range(5):
        bring_up(group, now)
        now += 60.0
        group.failed(group.epoch, 0, "boom", now=now)
        group.stopped(group.epoch, now=now)
        now += 1.0
        assert group.tick(now) == [Start(0, group.epoch)]


def test_an_old_epoch_is_sent_away() -> None:
    group = make_group(num_ranks=1, policy=FOREVER)
    bring_up(group)
    group.failed(1, 0, "boom", now=0.0)
    group.stopped(1, now=0.0)
    group.tick(100.0)

    (refused,) = group.hello(b"late", make_hello(0, epoch=1), now=100.0)

    assert isinstance(refused, Refuse)
    assert "epoch 1 is over" in refused.message


def test_ranks_that_do_not_belong_are_sent_away() -> None:
    group = make_group()
    group.hello(peer(0), make_hello(0), now=0.0)

    for rank, complaint in ((0, "here already"), (2, "ranks 0 to 1, not 2"), (-1, "not -1")):
        (refused,) = group.hello(b"x", make_hello(rank), now=0.0)
        assert isinstance(refused, Refuse)
        assert complaint in refused.message


def test_ranks_with_different_models_do_not_make_a_group() -> None:
    group = make_group()
    group.hello(peer(0), make_hello(0, vocab_size=100), now=0.0)
    (lost,) = group.hello(peer(1), make_hello(1, vocab_size=101), now=0.0)

    assert isinstance(lost, Lose)
    assert "different models" in lost.message


def test_a_start_that_takes_too_long_names_the_ranks_that_are_missing() -> None:
    group = make_group(start_timeout_s=5.0)
    group.hello(peer(0), make_hello(0), now=0.0)
    assert group.tick(4.9) == []
    (lost,) = group.tick(5.0)

    assert isinstance(lost, Lose)
    assert lost.message == (
        "not ready within start_timeout_s=5: ranks [1] have not loaded the model: "
        "rank 1 has not reached the engine"
    )


def test_a_rank_that_never_allocates_is_named() -> None:
    group = make_group(start_timeout_s=5.0)
    for rank in range(2):
        group.hello(peer(rank), make_hello(rank), now=0.0)
    group.ready(peer(1), now=1.0)
    (lost,) = group.tick(5.0)

    assert isinstance(lost, Lose)
    assert "ranks [0] have not allocated" in lost.message


Event = Callable[[WorkerGroup, float], list[Instruction]]

EVENTS: tuple[Event, ...] = (
    lambda group, now: group.hello(peer(0, group.epoch), make_hello(0, epoch=group.epoch), now),
    lambda group, now: group.hello(peer(1, group.epoch), make_hello(1, epoch=group.epoch), now),
    lambda group, now: group.ready(peer(0, group.epoch), now),
    lambda group, now: group.ready(peer(1, group.epoch), now),
    lambda group, now: group.failed(group.epoch, 0, "boom", now=now),
    lambda group, now: group.left(peer(1, group.epoch), now),
    lambda group, now: group.failed(group.epoch - 1, 0, "late", now=now),
    lambda group, now: group.stopped(group.epoch, now),
    lambda group, now: group.tick(now),
)


def check_history(history: Iterable[Instruction]) -> None:
    """What must hold of everything that a group ever asked for."""
    epoch, served, lost = 1, False, False
    for instruction in history:
        if isinstance(instruction, Start):
            assert instruction.epoch == epoch + 1
            assert lost
            epoch, served, lost = instruction.epoch, False, False
        elif isinstance(instruction, Serve):
            assert instruction.epoch == epoch
            assert not served
            assert not lost
            served = True
        elif isinstance(instruction, Lose):
            assert instruction.epoch == epoch
            assert not lost
            assert instruction.was_ready == served
            lost = True


def test_no_order_of_events_breaks_the_invariants() -> None:
    """Every state that any order of events reaches, and every event in it, for three epochs."""
    policy = RestartPolicy(max_restarts=2, first_pause_s=1.0)
    start = make_group(policy=policy, start_timeout_s=1e9)
    frontier: list[tuple[WorkerGroup, list[Instruction], float]] = [(start, [], 0.0)]
    seen: set[tuple[object, ...]] = set()
    while frontier:
        before, history, now = frontier.pop()
        for event in EVENTS:
            group = copy.deepcopy(before)
            given = [each for each in event(group, now + 50.0) if not isinstance(each, Refuse)]
            so_far = [*history, *given]
            check_history(so_far)
            assert group.epoch >= before.epoch
            assert (group.state == "ready") == is_whole(group)
            key = summary(group, so_far)
            if key not in seen:
                seen.add(key)
                frontier.append((group, so_far, now + 50.0))
    assert {key[0] for key in seen} == {"starting", "sizing", "ready", "lost", "waiting", "stopped"}
    assert {key[1] for key in seen} == {1, 2, 3}


def is_whole(group: WorkerGroup) -> bool:
    return len(group.ranks) == 2 and all(rank.is_ready for rank in group.ranks.values())


def summary(group: WorkerGroup, history: list[Instruction]) -> tuple[object, ...]:
    ranks = sorted((number, rank.is_ready) for number, rank in group.ranks.items())
    return (group.state, group.epoch, *ranks, *(type(each) for each in history))


def test_every_order_of_hellos_and_readies_serves_exactly_once() -> None:
    for hellos in itertools.permutations(range(3)):
        for readies in itertools.permutations(range(3)):
            group = make_group(num_ranks=3)
            given: list[Instruction] = []
            for rank in hellos:
                given += group.hello(peer(rank), make_hello(rank), now=0.0)
            for rank in readies:
                given += group.ready(peer(rank), now=0.0)
            assert [type(each) for each in given] == [SizePool, Serve]
