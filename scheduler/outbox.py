"""The news of one step, gathered as columns and sorted into one batch per client."""

from dataclasses import dataclass, field

import numpy as np

from scheduler.arrays import NO_INT32, NO_UINT8, BoolArray, Int32Array, Uint8Array, int32
from scheduler.plan import LogprobRows
from scheduler.request import Ended, Started, TokenBatch


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A batch for one client; the engine knows where the client is."""

    client: int
    batch: TokenBatch


@dataclass(slots=True, kw_only=True)
class Outbox:
    """Row i of the columns is one request's news; the lists name rows of few requests."""

    client: Int32Array
    handle: Int32Array
    count: Int32Array
    """0 or 1 tokens per row"""
    token: Int32Array
    """[sum of count]"""
    finish: Uint8Array
    started: list[tuple[int, Started]] = field(default_factory=list)
    """(client, news)"""
    ended: list[tuple[int, Ended]] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    """Rows refer to rows of the columns."""

    def batches(self) -> list[Outgoing]:
        if not len(self.client):
            return []
        first = int(self.client[0])
        if (self.client == first).all():
            return [self._batch(first, np.ones(len(self.client), dtype=np.bool_))]
        return [self._batch(int(c), self.client == c) for c in np.unique(self.client)]

    def _batch(self, client: int, mine: BoolArray) -> Outgoing:
        count = self.count[mine]
        finish = self.finish[mine]
        return Outgoing(
            client,
            TokenBatch(
                handle=self.handle[mine],
                count=NO_INT32 if count.all() else count,
                token=self.token[np.repeat(mine, self.count)],
                finish=finish if finish.any() else NO_UINT8,
                started=tuple(news for owner, news in self.started if owner == client),
                ended=tuple(news for owner, news in self.ended if owner == client),
                logprobs=None if self.logprobs is None else _only(self.logprobs, mine),
            ),
        )


def _only(logprobs: LogprobRows, mine: BoolArray) -> LogprobRows | None:
    """The log-probabilities of the rows that are `mine`, renumbered among those."""
    keep = mine[logprobs.row]
    if not keep.any():
        return None
    new_row = np.cumsum(mine, dtype=np.int32) - 1
    width = logprobs.width
    return LogprobRows(
        row=int32(new_row[logprobs.row[keep]]),
        position=logprobs.position[keep],
        width=width,
        token=logprobs.token.reshape(-1, width)[keep].reshape(-1),
        logprob=logprobs.logprob.reshape(-1, width)[keep].reshape(-1),
        rank=logprobs.rank[keep],
    )
