"""How ranks of one host come to share memory: threads stand for processes here."""

import itertools
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from worker.parallel_errors import MeetingFailed
from worker.segment import Segment, share_segment

NUM_BYTES = 8192
NUMBERS = itertools.count()


@pytest.fixture
def name() -> str:
    return f"test-segment-{os.getpid()}-{next(NUMBERS)}"


@pytest.fixture
def share(name: str) -> Iterator[Callable[..., Future[Segment]]]:
    """Starts one rank's `share_segment`; its segment is closed at the end."""
    with ThreadPoolExecutor(8) as threads:
        shares: list[Future[Segment]] = []

        def start(rank: int, **changes: object) -> Future[Segment]:
            settings: dict[str, object] = {
                "rank": rank,
                "size": 2,
                "num_bytes": NUM_BYTES,
                "version": 1,
                "timeout_s": 20.0,
            }
            shares.append(threads.submit(share_segment, name, **{**settings, **changes}))  # type: ignore[arg-type]
            return shares[-1]

        yield start
        for share in shares:
            if share.exception() is None:
                share.result().close()


Share = Callable[..., Future[Segment]]


def connect_as_stranger(name: str) -> socket.socket:
    """Reach rank 0's socket as soon as it is there."""
    while True:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            stranger.connect(b"\0" + name.encode())
            return stranger
        except ConnectionRefusedError:
            stranger.close()


def test_all_ranks_map_the_same_memory_whatever_the_order_they_come_in(share: Share) -> None:
    shares = [share(rank, size=3) for rank in (2, 1, 0)]

    maps = [mmap.mmap(one.result().fd, NUM_BYTES) for one in shares]
    maps[0][100] = 7

    assert [memory[100] for memory in maps] == [7, 7, 7]
    assert maps[0][:100] == bytes(100)


def test_the_memory_cannot_shrink_below_what_is_mapped(share: Share) -> None:
    share(1)

    with pytest.raises(PermissionError):
        os.ftruncate(share(0).result().fd, 0)


def test_nothing_can_be_reached_by_the_name_once_all_have_met(share: Share, name: str) -> None:
    for one in (share(0), share(1)):
        one.result()

    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late,
        pytest.raises(ConnectionRefusedError),
    ):
        late.connect(b"\0" + name.encode())


def test_rank_0_sees_each_rank_that_is_gone_and_the_others_see_rank_0(share: Share) -> None:
    first, second, third = [share(rank, size=3) for rank in range(3)]
    assert first.result().gone() == second.result().gone() == third.result().gone() == ()

    second.result().close()
    assert first.result().gone() == (1,)
    assert third.result().gone() == ()

    first.result().close()
    assert third.result().gone() == (0,)


def test_rank_0_names_the_ranks_that_did_not_come(share: Share) -> None:
    first = share(0, size=4, timeout_s=0.2)
    share(2, size=4)

    with pytest.raises(
        MeetingFailed, match=r"waited 0.2 s .*of 4 ranks these did not come: \[1, 3\]"
    ):
        first.result()


def test_a_rank_names_the_meeting_point_where_rank_0_is_not(share: Share, name: str) -> None:
    with pytest.raises(MeetingFailed, match=f"rank 1 looked 0.2 s for rank 0 at '{name}'"):
        share(1, timeout_s=0.2).result()


def test_a_rank_that_waits_for_a_third_says_so_after_the_time_limit(share: Share) -> None:
    first = share(0, size=3, timeout_s=1.0)

    with pytest.raises(MeetingFailed, match=r"got no memory within 0.2 s .*waits for another rank"):
        share(1, size=3, timeout_s=0.2).result()
    with pytest.raises(MeetingFailed, match="these did not come"):
        first.result()


@pytest.mark.parametrize("changes", [{"size": 3}, {"num_bytes": 4096}, {"version": 2}], ids=str)
def test_ranks_of_different_settings_are_both_told(
    share: Share, changes: dict[str, object]
) -> None:
    first, second = share(0), share(1, **changes)

    for one in (first, second):
        with pytest.raises(MeetingFailed, match=r"rank 1 was started for \d ranks and"):
            one.result()


@pytest.mark.parametrize("name", ["", "n" * 108], ids=len)
def test_a_name_that_no_socket_can_have_is_refused(share: Share, name: str) -> None:
    with pytest.raises(ValueError, match=f"1 to 107 bytes, got {len(name)}"):
        share(0).result()


def test_a_rank_that_comes_twice_is_refused(share: Share) -> None:
    first = share(0, size=3)
    twins = [share(1, size=3), share(1, size=3)]

    with pytest.raises(MeetingFailed, match="rank 1 came twice"):
        first.result()
    for twin in twins:
        with pytest.raises(MeetingFailed):
            twin.result()


def test_two_groups_cannot_meet_under_one_name(share: Share, name: str) -> None:
    first = share(0)
    connect_as_stranger(name).close()  # so rank 0 listens
    with pytest.raises(MeetingFailed, match="must be new for each start of a group"):
        share(0).result()
    share(1).result()

    assert first.result().gone() == ()


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n", bytes(28)], ids=str)
def test_a_stranger_at_the_meeting_point_disturbs_nobody(
    share: Share, name: str, greeting: bytes
) -> None:
    first = share(0)
    with connect_as_stranger(name) as stranger:
        if greeting:
            stranger.send(greeting)
        else:
            stranger.shutdown(socket.SHUT_RDWR)
        second = share(1)

        assert first.result().gone() == second.result().gone() == ()


def test_another_users_process_is_not_let_in(
    share: Share, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, rank_0_asks = os.geteuid(), threading.Event()

    def as_another_user() -> int:
        rank_0_asks.set()
        return own + 1

    monkeypatch.setattr(os, "geteuid", as_another_user)
    first = share(0, timeout_s=2.0)
    with connect_as_stranger(name) as stranger:
        stranger.send(b"stoker-s" + bytes(20))
        assert rank_0_asks.wait(10)
        with pytest.raises(MeetingFailed, match=r"these did not come: \[1\]"):
            first.result()


def test_a_meeting_point_of_another_user_is_not_entered(
    share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    first = share(0, timeout_s=1.0)

    with pytest.raises(MeetingFailed, match="belongs to another user"):
        share(1).result()
    with pytest.raises(MeetingFailed, match="did not come"):
        first.result()
