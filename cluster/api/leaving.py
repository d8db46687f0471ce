"""uvicorn's server with an end of ours: answers that run are finished, within a limit."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import uvicorn

LAST_WORDS_S = 2.0
"""For the ends of answers that were cut off to reach their readers."""


class LeavingServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT.

    Then it takes no more connections, and ends when its answers are given. After `drain_s`, or
    at a second signal, those that still run are cut off, and it ends soon.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        drain_s: float,
        on_started: Callable[[], None],
        on_leaving: Callable[[], None],
        cut_off: Callable[[], Awaitable[None]],
        siblings_path: str = "",
    ) -> None:
        """
        Args:
            on_started: told when connections are taken.
            on_leaving: told at the first signal; ends what would never end by itself.
            cut_off: makes every answer that runs come to its end.
            siblings_path: of a socket to take connections of other API servers from; empty: none.
        """
        super().__init__(config)
        self._drain_s = drain_s
        self._on_started = on_started
        self._on_leaving = on_leaving
        self._cut_off = cut_off
        self._siblings_path = siblings_path
        self._cutting: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Instead of uvicorn's handlers, which let the same signal end the process afterwards."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._siblings_path:
            self.servers.append(await self._serve_siblings(self._siblings_path))
        if self.started:
            self._on_started()

    async def _serve_siblings(self, path: str) -> asyncio.Server:
        protocol = partial(  # type: ignore[call-arg]  # it is `protocol_of`
            self.config.http_protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        Path(path).unlink(missing_ok=True)  # of one before us, who was killed
        return await asyncio.get_running_loop().create_unix_server(protocol, path)

    def _asked(self) -> None:
        if self.should_exit:
            self._cut()
            return
        self.should_exit = True
        self._on_leaving()
        asyncio.get_running_loop().call_later(self._drain_s, self._cut)

    def _cut(self) -> None:
        if self._cutting is None:
            self._cutting = asyncio.create_task(self._end_answers())

    async def _end_answers(self) -> None:
        await self._cut_off()
        await asyncio.sleep(LAST_WORDS_S)
        for connection in tuple(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self.force_exit = True
