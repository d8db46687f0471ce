"""Collectives between GPUs; `test_parallel.py` has the same class on CPUs."""

import pytest
import torch

from tests.worker import rank_tasks
from tests.worker.rank_processes import RankProcesses
from worker.parallel import MeetingPoint


@pytest.mark.gpu
def test_gpus_sum_in_rank_order_at_once_and_in_captured_graphs(ranks: RankProcesses) -> None:
    ranks.start(0, rank_tasks.listen_here)
    port = ranks.answer(0)
    assert isinstance(port, int)
    meeting = MeetingPoint(name="unused", host="127.0.0.1", port=port)

    ranks.run(rank_tasks.check_gpu_collectives, torch.cuda.device_count(), meeting)


def test_sums_left_to_the_backend_are_sums_all_the_same(ranks: RankProcesses) -> None:
    ranks.start(0, rank_tasks.listen_here)
    port = ranks.answer(0)
    assert isinstance(port, int)
    meeting = MeetingPoint(name="unused", host="127.0.0.1", port=port)

    sums = ranks.run(rank_tasks.sum_in_any_order, 3, meeting)

    assert sums == [[6.0, 12.0]] * 3
