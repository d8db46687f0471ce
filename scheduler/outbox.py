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
    count: Int32Array = field(default_factory=lambda: NO_INT32)
    """0 or 1 tokens per row; an empty column means one each"""
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
        if np.count_nonzero(self.client == first) == len(self.client):
            return [self._batch(first)]
        return [self._of(client)._batch(client) for client in sorted(set(self.client.tolist()))]

    def counts(self) -> Int32Array:
        """`count`, written out."""
        return self.count if len(self.count) else np.ones(len(self.handle), dtype=np.int32)

    def _of(self, client: int) -> "Outbox":
        """The rows and news of one client."""
        is_mine = self.client == client
        mine = is_mine.nonzero()[0]
        count, token = NO_INT32, self.token
        if len(self.count):
            count, token = self.count.take(mine), token[np.repeat(is_mine, self.count)]
        else:
            token = token.take(mine)
        return Outbox(
            client=self.client.take(mine),
            handle=self.handle.take(mine),
            count=count,
            token=token,
            finish=self.finish.take(mine),
            started=[(owner, news) for owner, news in self.started if owner == client],
            ended=[(owner, news) for owner, news in self.ended if owner == client],
            logprobs=None if self.logprobs is None else _only(self.logprobs, is_mine),
        )

    def _batch(self, client: int) -> Outgoing:
        return Outgoing(
            client,
            TokenBatch(
                handle=self.handle,
                count=NO_INT32 if np.count_nonzero(self.count) == len(self.count) else self.count,
                token=self.token,
                finish=self.finish if np.count_nonzero(self.finish) else NO_UINT8,
                started=tuple(news for _, news in self.started),
                ended=tuple(news for _, news in self.ended),
                logprobs=self.logprobs if self.logprobs and len(self.logprobs.row) else None,
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
