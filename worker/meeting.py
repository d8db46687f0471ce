"""How a rank meets its group: the ranks of its stage, and its neighbours in the stages beside it.

Every way of talking is chosen for those who talk: processes of one host share memory, even if
other ranks of the group are elsewhere. Whoever needs more meets at the store that rank 0 keeps.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import PrefixStore, Store  # typed here, and only re-exported

from worker.meeting_store import address_towards, open_store
from worker.nccl_pipe import meet_on_gpus
from worker.parallel import Communicator, MeetingPoint, join
from worker.parallel_errors import MeetingFailed
from worker.pipeline import NO_PIPES, Ends, GlooPipe, Pipe, Pipes, SharedMemoryPipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """A rank among the ranks of its group, stage after stage."""

    rank: int
    num_stages: int
    ranks_per_stage: int
    nodes: tuple[int, ...] = ()
    """By rank, a number of its host; empty: all are on one."""

    @property
    def size(self) -> int:
        return self.num_stages * self.ranks_per_stage

    @property
    def stage(self) -> int:
        return self.rank // self.ranks_per_stage

    def stage_ranks(self) -> range:
        """Of this rank's stage."""
        first = self.stage * self.ranks_per_stage
        return range(first, first + self.ranks_per_stage)

    def ends(self, timeout_s: float) -> Iterator[Ends]:
        """Of this rank's pipes: to the stage before, if there is one, then to the one after."""
        for other in (self.stage - 1, self.stage + 1):
            if 0 <= other < self.num_stages:
                yield Ends(
                    stage=self.stage,
                    rank=self.rank,
                    other_stage=other,
                    other_rank=self.rank + (other - self.stage) * self.ranks_per_stage,
                    timeout_s=timeout_s,
                )

    def share_a_host(self, ranks: Sequence[int]) -> bool:
        return not self.nodes or len({self.nodes[rank] for rank in ranks}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds for every meeting of a group."""

    device: torch.device
    step_bytes: int
    """Of the hidden states of the largest step."""
    start_timeout_s: float
    """How long to wait for ranks that still start."""
    timeout_s: float
    """How long a rank may keep another waiting within a step."""
    own_address: str = ""
    """Where others reach this rank; empty: the one that routes to rank 0."""


def meet_group(
    meeting: MeetingPoint, company: Company, terms: Terms, listener: socket.socket | None = None
) -> tuple[Communicator, Pipes]:
    """Meet everybody this rank talks to; `listener` is as `worker.parallel.join` says.

    Raises:
        MeetingFailed: a rank did not come in time, or does not fit.
    """
    if company.num_stages == 1:
        return _join_stage(meeting, company, terms, None, listener), NO_PIPES
    store = _open_store(meeting, company, terms, listener)
    if terms.device.type == "cuda":
        assert store is not None
        return meet_on_gpus(
            store,
            list(company.ends(terms.timeout_s)),
            rank=company.rank,
            num_stages=company.num_stages,
            ranks_per_stage=company.ranks_per_stage,
            device=terms.device,
            start_timeout_s=terms.start_timeout_s,
            timeout_s=terms.timeout_s,
        )
    with ExitStack() as undo:
        communicator = _join_stage(meeting, company, terms, store, None)
        undo.callback(communicator.close)
        by_side: dict[bool, Pipe] = {}
        for ends in company.ends(terms.timeout_s):
            pipe = _join_neighbour(meeting, company, ends, terms, store)
            undo.callback(pipe.close)
            by_side[ends.other_stage < ends.stage] = pipe
        undo.pop_all()
    return communicator, Pipes(before=by_side.get(True), after=by_side.get(False))


def _open_store(
    meeting: MeetingPoint, company: Company, terms: Terms, listener: socket.socket | None
) -> Store | None:
    """Rank 0's, if there are ranks that need it."""
    if terms.device.type == "cpu" and company.share_a_host(range(company.size)):
        if listener is not None:
            listener.close()
        return None
    if not meeting.host or (meeting.port == 0 and listener is None):
        raise MeetingFailed(
            f"{company.size} ranks on {terms.device.type}, on hosts {company.nodes}, meet at an "
            f"address of rank 0, but got host {meeting.host!r} and port {meeting.port}"
        )
    return open_store(
        meeting.host,
        meeting.port,
        rank=company.rank,
        size=company.size,
        timeout_s=terms.start_timeout_s,
        listener=listener,
    )


def _join_stage(
    meeting: MeetingPoint,
    company: Company,
    terms: Terms,
    store: Store | None,
    listener: socket.socket | None,
) -> Communicator:
    stage = company.stage_ranks()
    name = meeting.name if company.num_stages == 1 else f"{meeting.name}.{company.stage}"
    return join(
        MeetingPoint(name=name, host=meeting.host, port=meeting.port),
        rank=company.rank - stage.start,
        size=len(stage),
        device=terms.device,
        is_one_host=company.share_a_host(stage),
        start_timeout_s=terms.start_timeout_s,
        timeout_s=terms.timeout_s,
        listener=listener,
        own_address=terms.own_address,
        store=None if store is None else PrefixStore(f"stage {company.stage}", store),
    )


def _join_neighbour(
    meeting: MeetingPoint, company: Company, ends: Ends, terms: Terms, store: Store | None
) -> Pipe:
    first = min(ends.rank, ends.other_rank)
    if company.share_a_host((ends.rank, ends.other_rank)):
        return SharedMemoryPipe(
            f"{meeting.name}-{first}",
            ends,
            step_bytes=terms.step_bytes,
            start_timeout_s=terms.start_timeout_s,
        )
    assert store is not None, "ranks of two hosts have a store"
    return GlooPipe(
        PrefixStore(f"pipe after {first}", store),
        ends,
        own_address=terms.own_address or address_towards(meeting.host, meeting.port or 1),
        start_timeout_s=terms.start_timeout_s,
    )
