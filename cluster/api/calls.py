"""One HTTP call: the requests it made, and what happens when its client leaves.

Everything here runs on the event loop. A call is over when each of its requests is done, or
when one of them has failed, for half an answer is none.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from starlette.types import Receive

from cluster.api.errors import (
    CANCELLED,
    FAILED,
    SHUTTING_DOWN,
    TIMED_OUT,
    ApiError,
    ErrorKind,
    bad_request,
)
from cluster.api.position import LAST_EVENT_ID, Place, Position
from cluster.frontend.draft import Draft
from cluster.frontend.errors import RequestError
from cluster.frontend.loop_client import LoopClient
from cluster.frontend.requests import LiveOutput, LiveRequest
from scheduler.request import Finish

T = TypeVar("T")


def submit_all(engine: LoopClient, drafts: Sequence[Draft]) -> list[LiveRequest]:
    """
    Raises:
        InvalidRequest, EngineUnreachable, ...: one could not be submitted; then none is.
    """
    requests: list[LiveRequest] = []
    try:
        for draft in drafts:
            requests.append(engine.submit(draft))
    except Exception:
        cancel_all(engine, requests)
        raise
    return requests


def cancel_all(engine: LoopClient, requests: Sequence[LiveRequest]) -> None:
    """End whatever still runs."""
    for request in requests:
        with contextlib.suppress(RequestError):  # there is no engine to tell
            engine.cancel(request)


class Call:
    """The live requests of one HTTP call, in the order of its prompts."""

    def __init__(
        self,
        call_id: str,
        engine: LoopClient,
        requests: Sequence[LiveRequest],
        on_close: Callable[["Call"], None],
        *,
        is_kept: bool = False,
    ) -> None:
        """
        Args:
            is_kept: whether the requests outlive this call, because somebody may come back.
        """
        self.id = call_id
        self.requests = requests
        self.has_left = False
        """Whether the client closed its connection before it had the answer."""
        self._engine = engine
        self._on_close = on_close
        self._bell = asyncio.Event()
        self._deliver: Callable[[], None] = self._bell.set
        self._watch: asyncio.Task[None] | None = None
        self._is_closed = False
        self._is_kept = is_kept
        for request in requests:
            request.watchers.append(self._ring)

    @property
    def outputs(self) -> list[LiveOutput]:
        return [output for request in self.requests for output in request.outputs]

    @property
    def is_done(self) -> bool:
        return all(request.is_done for request in self.requests)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come that belongs to an answer."""
        is_done = True
        if self.has_left:
            return True
        for request in self.requests:
            if request.failure is not None:
                return True
            for output in request.outputs:
                if output.finish is Finish.NOT_YET:
                    is_done = False
                elif output.finish in _KIND_BY_FINISH:
                    return True
        return is_done

    @property
    def failure(self) -> Exception | None:
        """Why there is no answer, or none that is whole."""
        for request in self.requests:
            if request.failure is not None:
                return request.failure
        for output in self.outputs:
            kind = _KIND_BY_FINISH.get(output.finish)
            if kind is not None:
                return self._error_of_end(output, kind)
        if self.has_left and not self.is_done:
            return ApiError("the client left", CANCELLED)
        return None

    def leave_with(self, receive: Receive) -> None:
        """From now on, cancel the call when its client closes the connection."""
        self._watch = asyncio.create_task(self._cancel_on_disconnect(receive))

    async def news(self) -> None:
        """Wait until something has changed since the last time that this returned."""
        await self._bell.wait()
        self._bell.clear()

    def deliver_to(self, deliver: Callable[[], None]) -> None:
        """From now on call this of news, which may `wake` whoever waits for them."""
        self._deliver = deliver

    def wake(self) -> None:
        """Let `news` return."""
        self._bell.set()

    async def begin(self) -> None:
        """Wait for the first news of any output.

        Raises:
            Exception: `failure`, if the call ended before it had anything to show.
        """
        while not any(output.token_ids or not output.is_live for output in self.outputs):
            await self.news()
        self._bell.set()  # the same news is for whoever reads the outputs
        self._raise_failure(unless_begun=True)

    async def reach(self, position: Position) -> None:
        """Wait until the outputs are as far as a reader was who left.

        Raises:
            ApiError: 400, the position is not of such a call.
            Exception: `failure`.
        """
        outputs, places = self.outputs, position.reached
        if len(position.places) != len(outputs):
            raise bad_request(
                f"{LAST_EVENT_ID} speaks of {len(position.places)} outputs, this call has "
                f"{len(outputs)}",
                LAST_EVENT_ID,
            )
        while not self.is_over and not all(map(_has_reached, outputs, places)):
            await self.news()
        self._bell.set()
        self._raise_failure()

    async def finish(self) -> None:
        """Wait for the end of all outputs.

        Raises:
            Exception: `failure`.
        """
        while not self.is_done and self.failure is None:
            await self.news()
        self._raise_failure()

    def cancel(self) -> None:
        """End whatever still runs."""
        cancel_all(self._engine, self.requests)

    def leave(self) -> None:
        """The client is gone."""
        self.has_left = True
        if self._is_kept:
            self.wake()
        else:
            self.cancel()

    def close(self) -> None:
        """The answer is out, or there will be none. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._deliver = self._bell.set
        if self._is_kept:
            for request in self.requests:
                request.watchers.remove(self._ring)
        else:
            self.cancel()
        self._on_close(self)

    def _ring(self, _: LiveRequest) -> None:
        self._deliver()

    def _raise_failure(self, *, unless_begun: bool = False) -> None:
        failure = self.failure
        if failure is None:
            return
        if unless_begun and any(output.token_ids for output in self.outputs):
            return
        raise failure

    def _error_of_end(self, output: LiveOutput, kind: ErrorKind) -> ApiError:
        message = output.message or _MESSAGES.get(kind, "the request failed")
        why_engine_ends = output.message or self._engine.news
        if kind is CANCELLED and why_engine_ends:
            kind, message = SHUTTING_DOWN, f"the request was cut off: {why_engine_ends}"
        return ApiError(message, kind)

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        await _left(receive)
        self.leave()


def _has_reached(output: LiveOutput, place: Place | None) -> bool:
    if place is None or not output.is_live:
        return True
    return len(output.token_ids) >= place.num_tokens and not place.has_ended


async def unless_left(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """What some work brings; it is given up when the client closes its connection.

    Raises:
        ApiError: 499, which nobody hears.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError("the client left before its prompt was encoded", CANCELLED)
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _left(receive: Receive) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


_KIND_BY_FINISH = {
    Finish.ABORT: CANCELLED,
    Finish.TIMEOUT: TIMED_OUT,
    Finish.ERROR: FAILED,
}
_MESSAGES = {
    CANCELLED: "the request was cancelled",
    TIMED_OUT: "the request's timeout passed before it was answered",
}
