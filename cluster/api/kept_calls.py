"""Calls with an idempotency key: what they made is kept while nobody reads it, for a while.

Tokens are what is kept; every reader writes them anew in its own shape, from where it left off.
A call whose readers have all gone goes on until its time is over, or until others need its room.
One that fails is forgotten at once, so that whoever tries again gets a new one.
"""

import asyncio

from cluster.api.calls import cancel_all
from cluster.frontend.loop_client import LoopClient
from cluster.frontend.requests import LiveRequest
from cluster.logs import EventLog
from scheduler.request import Finish

TOKEN_BYTES = 100
"""Of one token with its text and its time, as Python holds them (measured: 70 to 100)."""
LOGPROB_BYTES = 150
"""Of one log-probability with its token."""

_log = EventLog("api")


class KeptCall:
    """One key's call."""

    def __init__(
        self, name: str, call_id: str, fingerprint: bytes, created: int, requests: list[LiveRequest]
    ) -> None:
        """
        Args:
            name: of the key, which no other caller's key has.
            fingerprint: of what was asked.
        """
        self.name, self.call_id, self.fingerprint = name, call_id, fingerprint
        self.created, self.requests = created, requests
        self.num_readers = 0
        self.num_bytes = 0
        """Counted while nobody reads it."""
        self.timer: asyncio.TimerHandle | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it ended without an answer."""
        ends = (output.finish for request in self.requests for output in request.outputs)
        return any(request.failure is not None for request in self.requests) or any(
            end in (Finish.ABORT, Finish.TIMEOUT, Finish.ERROR) for end in ends
        )


class KeptCalls:
    """All of one API server."""

    def __init__(self, engine: LoopClient, *, keep_s: float, max_bytes: int) -> None:
        """
        Args:
            keep_s: how long a call is kept that nobody reads.
            max_bytes: of all calls that nobody reads; beyond it the longest unread one goes.
        """
        self._engine = engine
        self._keep_s, self._max_bytes = keep_s, max_bytes
        self._by_name: dict[str, KeptCall] = {}
        self._unread: dict[str, KeptCall] = {}
        """Those without readers, longest unread first."""
        self.num_bytes = 0
        """Of those without readers, about."""

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> KeptCall | None:
        kept = self._by_name.get(name)
        if kept is not None and kept.has_failed and not kept.num_readers:
            self._forget(kept)
            return None
        return kept

    def keep(self, kept: KeptCall) -> None:
        """A new one, which is about to be read."""
        assert kept.name not in self._by_name
        self._by_name[kept.name] = kept

    def enter(self, kept: KeptCall) -> None:
        """One more reader."""
        kept.num_readers += 1
        self._count_out(kept)

    def leave(self, kept: KeptCall) -> None:
        """One reader less; without any, its time runs."""
        kept.num_readers -= 1
        if kept.num_readers:
            return
        if kept.has_failed or not self._keep_s:
            self._forget(kept)
            return
        kept.num_bytes = sum(map(bytes_of, kept.requests))
        self.num_bytes += kept.num_bytes
        self._unread[kept.name] = kept
        loop = asyncio.get_running_loop()
        kept.timer = loop.call_later(self._keep_s, self._forget, kept)
        while self.num_bytes > self._max_bytes:
            oldest = next(iter(self._unread.values()))
            _log.info("kept_call_dropped", call=oldest.call_id, bytes=oldest.num_bytes)
            self._forget(oldest)

    def _forget(self, kept: KeptCall) -> None:
        self._count_out(kept)
        del self._by_name[kept.name]
        cancel_all(self._engine, kept.requests)

    def _count_out(self, kept: KeptCall) -> None:
        if self._unread.pop(kept.name, None) is not None:
            self.num_bytes -= kept.num_bytes
        if kept.timer is not None:
            kept.timer.cancel()
            kept.timer = None


def bytes_of(request: LiveRequest) -> int:
    """About what a request holds, or may hold by its end."""
    draft = request.draft
    sampling, num_prompt = draft.sampling, draft.num_prompt
    num_bytes = 8 * num_prompt
    if sampling.prompt_logprobs is not None:
        num_bytes += num_prompt * LOGPROB_BYTES * (1 + sampling.prompt_logprobs)
    per_token = TOKEN_BYTES
    if sampling.logprobs is not None:
        per_token += LOGPROB_BYTES * (1 + sampling.logprobs)
    for output in request.outputs:
        most = sampling.max_tokens or 0
        num_bytes += per_token * (most if output.is_live else len(output.token_ids))
    return num_bytes
