"""What sums between two ranks cost, measured between two threads over loopback."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from worker.link_probe import LinkFigures, measure_link
from worker.parallel_errors import MeetingFailed


def measure_both(timeout_s: float = 20.0) -> list[LinkFigures]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])

    def measure(rank: int) -> LinkFigures:
        given = listener if rank == 0 else None
        return measure_link("127.0.0.1", port, rank=rank, listener=given, timeout_s=timeout_s)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(measure, (0, 1)))


def test_both_ranks_see_a_latency_and_a_bandwidth() -> None:
    for figures in measure_both():
        assert 0 < figures.latency_s < 1
        assert figures.bytes_per_s > 1e5


def test_a_rank_that_is_alone_says_so_when_its_time_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    with pytest.raises(MeetingFailed, match=rf"rank 1 did not reach rank 0 at 127\.0\.0\.1:{port}"):
        measure_link("127.0.0.1", port, rank=1, listener=None, timeout_s=0.2)
