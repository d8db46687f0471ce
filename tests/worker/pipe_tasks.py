"""What `RankProcesses` run in tests of pipes: the rank of one stage, with its own checks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.worker import rank_tasks
from worker.meeting import Company, Terms, meet_group
from worker.meeting_store import open_store
from worker.nccl_pipe import meet_on_gpus
from worker.parallel import Communicator, MeetingPoint
from worker.pipeline import Pipes

STEP_BYTES = 64 * 1024
START_TIMEOUT_S = 30.0
TIMEOUT_S = 30.0
ROWS = (1, 7, 64, 200)
"""200 rows of WIDTH are more than STEP_BYTES, and go in pieces."""
WIDTH = 96


@contextmanager
def met(
    kind: str,
    rank: int,
    num_stages: int,
    meeting: MeetingPoint,
    *,
    tp: int = 1,
    nodes: tuple[int, ...] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[tuple[Communicator, Pipes]]:
    """A stage's communicator and pipes; "torch" is what GPUs have, on torch's gloo backend."""
    listener = rank_tasks._listeners.pop(meeting.port, None)
    size = num_stages * tp
    if nodes is None:
        nodes = () if kind == "shared" else tuple(range(size))
    company = Company(rank=rank, num_stages=num_stages, ranks_per_stage=tp, nodes=nodes)
    device = torch.device("cpu")
    if kind == "torch":
        store = open_store(
            meeting.host,
            meeting.port,
            rank=rank,
            size=size,
            timeout_s=START_TIMEOUT_S,
            listener=listener,
        )
        communicator, pipes = meet_on_gpus(
            store,
            list(company.ends(timeout_s)),
            rank=rank,
            num_stages=num_stages,
            ranks_per_stage=tp,
            device=device,
            start_timeout_s=START_TIMEOUT_S,
            timeout_s=timeout_s,
            backend="gloo",
        )
    else:
        terms = Terms(
            device=device,
            step_bytes=STEP_BYTES,
            start_timeout_s=START_TIMEOUT_S,
            timeout_s=timeout_s,
        )
        communicator, pipes = meet_group(meeting, company, terms, listener)
    try:
        yield communicator, pipes
    finally:
        communicator.close()
        pipes.close()


def states(step: int, place: int = 0) -> Tensor:
    """What the first stage sends in a step."""
    rows = ROWS[step % len(ROWS)]
    return torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH) + step + place / 8


def check_passing(
    rank: int,
    size: int,
    kind: str,
    meeting: MeetingPoint,
    tp: int = 1,
    nodes: tuple[int, ...] | None = None,
) -> list[str]:
    """Each stage adds a number to what comes and passes it on; the last one knows what must come.

    Returns the kinds of the communicator and of the pipes.
    """
    num_stages, place = size // tp, rank % tp
    with met(kind, rank, num_stages, meeting, tp=tp, nodes=nodes) as (communicator, pipes):
        pipes.meet(torch.zeros(1))
        for step in range(1, 25):
            communicator.start_step(step)
            pipes.start_step(step)
            hidden = states(step, place)
            if pipes.before is not None:
                wanted, hidden = hidden, torch.empty_like(hidden)
                pipes.before.receive(hidden)
                assert torch.equal(hidden, wanted + rank // tp - 1 if rank >= tp else wanted)
            hidden += communicator.all_reduce(torch.ones(1)) / tp if rank >= tp else 0.0
            if pipes.after is not None:
                pipes.after.send(hidden)
                hidden.fill_(-1.0)  # it is ours again
        pipes.meet(torch.zeros(1))
        time.sleep(0.3)  # gloo may drop what was sent last when its sender leaves at once
        both = [pipe for pipe in (pipes.before, pipes.after) if pipe is not None]
        return [type(each).__name__ for each in (communicator, *both)]


def send_ahead(rank: int, kind: str, meeting: MeetingPoint, steps: int, timeout_s: float) -> None:
    """Send steps that nobody takes yet, and say so after each; then wait to be told to leave."""
    with met(kind, rank, 2, meeting, timeout_s=timeout_s) as (_, pipes):
        assert pipes.after is not None
        for step in range(1, steps + 1):
            pipes.start_step(step)
            pipes.after.send(torch.full((4, WIDTH), float(step)))
            rank_tasks.say(step)
        rank_tasks.hear()


def take_when_told(rank: int, kind: str, meeting: MeetingPoint, timeout_s: float) -> list[float]:
    """Receive as many steps as are told, then return what came."""
    with met(kind, rank, 2, meeting, timeout_s=timeout_s) as (_, pipes):
        assert pipes.before is not None
        count = rank_tasks.hear()
        assert isinstance(count, int)
        came = []
        for step in range(1, count + 1):
            pipes.start_step(step)
            into = torch.empty(4, WIDTH)
            pipes.before.receive(into)
            came.append(float(into[3, 5]))
        rank_tasks.say(came)
        rank_tasks.hear()
        return came


def meet_after_a_step_of_one(rank: int, kind: str, meeting: MeetingPoint) -> None:
    """The first stage sends a step that the other one does not know of; then both meet."""
    with met(kind, rank, 2, meeting, timeout_s=5.0) as (_, pipes):
        if pipes.after is not None:
            pipes.after.send(states(1))
        pipes.meet(torch.zeros(1))
