"""The feed of steps: what a row says, when it is said, and that it costs nothing unwatched."""

import threading
from pathlib import Path

from cluster.messages.reports import StepNews, WatchSteps
from cluster.step_feed import NEWS_EVERY_S, StepFeed
from tests.cluster.cluster_rig import Rig, TestClient, wait_for_status
from tests.cluster.scripted import Script
from tests.scheduler.builders import Bench, make_request

WATCHER = 3


class Watched:
    """A scheduler with scripted groups whose steps go through a feed."""

    def __init__(self, *, is_watched: bool = True, num_groups: int = 1, num_blocks: int = 64):
        self.bench = Bench(num_groups=num_groups, num_blocks=num_blocks)
        self.feed = StepFeed(began=0.0)
        if is_watched:
            self.feed.watch(WATCHER)

    def step(self, group: int = 0) -> None:
        scheduler = self.bench.scheduler
        self.bench.now += 1.0
        plan = self.bench.plan(group)
        if plan is None:  # it could only preempt
            return
        self.feed.planned(group, plan, scheduler)
        result = self.bench.workers[group].execute(self.bench.in_flight[group].popleft())
        self.bench.writes[group].popleft()
        outcome = scheduler.apply(group, result, self.bench.now)
        self.bench.take(outcome)
        self.feed.answered(group, result, outcome, self.bench.now)

    def news(self, after_s: float = 0.0) -> StepNews | None:
        self.bench.now += after_s
        return self.feed.news(self.bench.scheduler, self.bench.now)


def test_a_row_says_what_the_step_computed_and_how_full_the_group_was() -> None:
    watched = Watched()
    watched.bench.submit(make_request(1, prompt=10))
    watched.step()
    watched.bench.submit(make_request(2, prompt=6))
    watched.step()

    news = watched.news()

    assert news is not None
    assert news.step.tolist() == [1, 2]
    assert news.age_s.tolist() == [1.0, 0.0]
    assert news.prefill_tokens.tolist() == [10, 6]
    assert news.decode_tokens.tolist() == [0, 1]
    assert news.new_tokens.tolist() == [1, 2]
    assert news.running.tolist() == [1, 2]
    assert news.used_blocks.tolist() == [3, 5]
    assert news.cached_blocks.tolist() == [2, 3]
    assert (news.groups[0].num_running, news.groups[0].num_blocks) == (2, 64)


def test_news_says_how_long_first_tokens_took_from_arrival() -> None:
    watched = Watched()
    watched.bench.submit(make_request(1, prompt=100))  # two steps of at most 64 tokens
    watched.step()
    first = watched.news()
    watched.step()
    second = watched.news()

    assert first is not None
    assert first.first_token_s.tolist() == []
    assert second is not None
    assert second.first_token_s.tolist() == [2.0]


def test_a_row_says_how_much_of_a_prompt_was_found_in_the_cache() -> None:
    watched = Watched()
    watched.bench.submit(make_request(1, prompt=list(range(1, 11)), max_tokens=1))
    watched.step()
    watched.bench.submit(make_request(2, prompt=list(range(1, 11)), max_tokens=1))
    watched.step()

    news = watched.news()

    assert news is not None
    assert news.cached_tokens.tolist() == [0, 8]
    assert news.prefill_tokens.tolist() == [10, 2]


def test_a_row_says_that_a_sequence_lost_its_blocks() -> None:
    watched = Watched(num_blocks=8)
    watched.bench.submit(make_request(1, prompt=8, max_tokens=20))
    watched.bench.submit(make_request(2, prompt=8, max_tokens=20))
    preempted = []
    while not watched.bench.scheduler.is_idle:
        watched.step()
        if news := watched.news():
            preempted += news.preempted.tolist()

    assert sum(preempted) == watched.bench.scheduler.counters.preemptions > 0


def test_rows_of_several_groups_are_told_apart() -> None:
    watched = Watched(num_groups=2)
    for handle in range(4):
        watched.bench.submit(make_request(handle))
    watched.step(0)
    watched.step(1)

    news = watched.news()

    assert news is not None
    assert news.group.tolist() == [0, 1]
    assert [load.group for load in news.groups] == [0, 1]


def test_nothing_is_recorded_while_nobody_watches_or_after_the_last_one_left() -> None:
    watched = Watched(is_watched=False)
    watched.bench.submit(make_request(1, prompt=5))
    watched.step()
    assert watched.news() is None
    watched.feed.watch(WATCHER)
    watched.feed.watch(WATCHER + 1)
    watched.step()
    watched.feed.leave(WATCHER)
    watched.step()
    first = watched.news()
    watched.step()
    watched.feed.leave(WATCHER + 1)
    watched.feed.watch(WATCHER)
    second = watched.news(NEWS_EVERY_S)

    assert first is not None
    assert first.step.tolist() == [2, 3]
    assert second is not None
    assert second.step.tolist() == []


def test_news_is_sent_at_most_every_so_often_and_only_when_something_changed() -> None:
    watched = Watched()
    watched.bench.submit(make_request(1, max_tokens=2))
    assert watched.news() is not None
    watched.step()
    due = watched.feed.next_news_at(watched.bench.scheduler)
    assert due is not None
    assert watched.feed.news(watched.bench.scheduler, due - 0.001) is None
    assert watched.feed.news(watched.bench.scheduler, due) is not None
    assert watched.feed.next_news_at(watched.bench.scheduler) is None
    watched.bench.scheduler.abort_client(7, watched.bench.now)  # no step, but it runs no more
    last = watched.news(NEWS_EVERY_S)

    assert last is not None
    assert last.groups[0].num_running == 0


def test_steps_of_a_lost_epoch_are_not_taken_for_those_of_the_next() -> None:
    watched = Watched()
    watched.bench.submit(make_request(1))
    plan = watched.bench.plan()
    assert plan is not None
    watched.feed.planned(0, plan, watched.bench.scheduler)
    watched.bench.lose_group(0)
    watched.bench.add_group(0, 32, epoch=2)
    watched.step()

    news = watched.news()

    assert news is not None
    assert news.step.tolist() == [1]
    assert news.groups[0].num_blocks == 32


# --- through a real socket ------------------------------------------------------------------


def steps_until_idle(client: TestClient) -> tuple[list[int], int]:
    """Step numbers and new tokens of all news until nothing runs any more."""
    steps: list[int] = []
    num_tokens = 0
    while True:
        news = client.next_of(StepNews)
        steps += news.step.tolist()
        num_tokens += int(news.new_tokens.sum())
        if steps and not any(load.num_running for load in news.groups):
            return steps, num_tokens


def test_a_watcher_hears_of_every_step_and_that_the_engine_is_idle_in_the_end(
    tmp_path: Path,
) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        watcher, other = rig.client(), rig.client()
        watcher.send(WatchSteps(True))
        before = watcher.next_of(StepNews)
        for _ in range(3):
            other.submit(num_prompt=10, max_tokens=20)
        steps, num_tokens = steps_until_idle(watcher)

        assert before.groups[0].num_running == 0
        assert steps == list(range(1, len(steps) + 1))
        assert num_tokens == 60


def test_a_watcher_that_has_enough_or_is_gone_is_told_no_more(tmp_path: Path) -> None:
    hold = threading.Event()
    with Rig(tmp_path) as rig:
        rig.start_worker(Script(hold=hold))
        watcher, leaver = rig.client(), rig.client()
        for client in (watcher, leaver):
            client.send(WatchSteps(True))
            client.next_of(StepNews)
        watcher.send(WatchSteps(False))
        leaver.close()
        wait_for_status(watcher, lambda status: status.num_clients == 1)
        handle = watcher.submit(max_tokens=20)
        hold.set()
        watcher.finish(handle)
        status = watcher.status()

        assert status.totals.num_steps > 0
        assert status.totals.num_cut_clients == 0
        assert list(rig.engine._steps.watchers) == []
