"""What collectives between two ranks cost, measured by the ones that serving uses."""

import socket
import statistics
import time
from dataclasses import dataclass

import torch

from worker.gloo import GlooCommunicator
from worker.meeting_store import address_towards, open_store

SMALL_BYTES = 2304
"""A row of hidden states of a small model."""
LARGE_BYTES = 1 << 20
NUM_SMALL = 20
NUM_LARGE = 8
LONGEST_S = 0.5
"""No more large sums are begun after this long."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Between two ranks, as each of them sees it."""

    latency_s: float
    """Of a small sum, the median."""
    bytes_per_s: float
    """Of large sums, by the bytes that were summed."""


def measure_link(
    host: str, port: int, *, rank: int, listener: socket.socket | None, timeout_s: float
) -> LinkFigures:
    """Meet the other of two CPU ranks at rank 0's `host`:`port`, and sum.

    Both make the same number of sums: rank 0 says after each large one whether it was the last.

    Raises:
        MeetingFailed: they did not meet within `timeout_s`.
        CollectiveFailed: a sum took longer than that.
    """
    store = open_store(host, port, rank=rank, size=2, timeout_s=timeout_s, listener=listener)
    ranks = GlooCommunicator(
        store,
        rank=rank,
        size=2,
        own_address=address_towards(host, port or 1),
        start_timeout_s=timeout_s,
        timeout_s=timeout_s,
    )
    try:
        small = torch.zeros(SMALL_BYTES // 4)
        seconds = [_time_of_sum(ranks, small) for _ in range(NUM_SMALL)]
        return LinkFigures(statistics.median(seconds), _bandwidth(ranks))
    finally:
        ranks.close()


def _time_of_sum(ranks: GlooCommunicator, tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    ranks.all_reduce(tensor)
    return time.perf_counter() - began


def _bandwidth(ranks: GlooCommunicator) -> float:
    large = torch.zeros(LARGE_BYTES // 4)
    taken_s = 0.0
    for count in range(1, NUM_LARGE + 1):
        taken_s += _time_of_sum(ranks, large)
        enough = torch.tensor([float(taken_s > LONGEST_S)])
        if float(ranks.broadcast(enough)) or count == NUM_LARGE:
            break
    return count * LARGE_BYTES / taken_s
