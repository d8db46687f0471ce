"""The same as `stoker.client` for asyncio: nothing here blocks the event loop."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from os import PathLike
from time import monotonic
from typing import TypeVar

from cluster.frontend.draft import Draft, Prompt, RequestOptions
from cluster.frontend.engine_client import ClientConfig, EngineClient, seeds_from
from cluster.frontend.errors import QueueFull, WaitTimedOut
from cluster.frontend.requests import LiveRequest, Watcher
from cluster.frontend.tokenizer import Tokenizer
from cluster.messages.clients import ServerInfo
from cluster.messages.reports import Status
from scheduler.sampling import SamplingParams
from stoker.batch import BatchQueue
from stoker.outputs import Piece, RequestOutput
from stoker.prompts import Chat, chat_draft, chat_drafts, prompt_drafts
from stoker.reader import PieceReader, request_output
from stoker.running import key_file_for

Answer = TypeVar("Answer")

NUM_THREADS = 4
"""Threads that encode prompts and wait for the engine, for one client. More: long prompts
delay each other less."""


class AsyncHandle:
    """One submitted request. `await` gives its result; leaving `async with` cancels it."""

    def __init__(self, engine: EngineClient, live: LiveRequest) -> None:
        self._engine = engine
        self._live = live

    @property
    def request_id(self) -> str:
        return self._live.draft.request_id

    @property
    def is_done(self) -> bool:
        return self._live.is_done

    async def result(self, timeout_s: float | None = None) -> RequestOutput:
        """Wait for the whole answer. A caller that is cancelled leaves the request running.

        Raises:
            WaitTimedOut: it was not there within `timeout_s`; the request goes on.
            InvalidRequest, QueueFull, EngineLost, ...: there is no answer; the error says why.
        """
        try:
            async with asyncio.timeout(timeout_s):
                live = await self.wait_done()
        except TimeoutError:
            raise WaitTimedOut(
                f"{self.request_id} was not answered within {timeout_s:g} s; it goes on. Wait "
                "again, or cancel it"
            ) from None
        if live.failure is not None:
            raise live.failure
        return request_output(live)

    async def wait_done(self) -> LiveRequest:
        """Wait until there is an answer or a failure, and give both."""
        live = self._live
        await self._until(lambda: live.is_done)
        return live

    def __await__(self) -> Generator[object, None, RequestOutput]:
        return self.result().__await__()

    def snapshot(self) -> RequestOutput:
        """What is there by now."""
        with self._engine.lock:
            return request_output(self._live)

    def cancel(self) -> None:
        """End the request with what it has so far (`finish_reason` "abort"). Does not wait."""
        self._engine.cancel(self._live)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces from the beginning, as they come; a slow reader gets larger ones.

        Raises:
            EngineLost, ...: after the pieces that came before it happened.
        """
        reader = PieceReader(self._live)
        pieces: list[Piece] = []

        def has_news() -> bool:
            pieces.extend(reader.read())
            return bool(pieces)

        while not reader.is_at_end:
            await self._until(has_news)
            for piece in pieces:
                yield piece
            pieces.clear()
        if self._live.failure is not None:
            raise self._live.failure

    async def __aenter__(self) -> "AsyncHandle":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`, asked with the lock held whenever the request changed."""
        bell = _Bell()
        with self._engine.lock:
            if condition():
                return
            self._live.watchers.append(bell.ring)
        try:
            while True:
                await bell.wait()
                with self._engine.lock:
                    if condition():
                        return
        finally:
            with self._engine.lock:
                self._live.watchers.remove(bell.ring)


class _Bell:
    """Wakes a task from another thread; many rings before it wakes are one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._is_rung = False
        self.ring: Watcher = self._ring

    def _ring(self, _: LiveRequest) -> None:
        if not self._is_rung:
            self._is_rung = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()
        self._is_rung = False


class AsyncClient:
    """A connection to a running engine, for asyncio. Arguments and behaviour as `Client`."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 10.0,
        label: str = "",
        key_file: str | PathLike[str] | None = None,
        seed: int | None = None,
        recovery_s: float = 60.0,
    ) -> None:
        config = ClientConfig(
            address=address,
            connect_timeout_s=connect_timeout_s,
            label=label,
            key_file=key_file_for(address, key_file),
            recovery_s=recovery_s,
        )
        self._engine = EngineClient(config, draw_seed=seeds_from(seed))
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="stoker-async-client")
        self._closer = weakref.finalize(self, self._engine.close)

    @property
    def address(self) -> str:
        return self._engine.config.address

    async def info(self, timeout_s: float | None = None) -> ServerInfo:
        """What the engine serves; waits until it is ready."""
        return await self._in_thread(lambda: self._engine.info(timeout_s))

    async def status(self, timeout_s: float | None = None) -> Status:
        """How the engine is: groups, queue, counters."""
        return await self._in_thread(lambda: self._engine.status(timeout_s))

    async def get_default_sampling_params(self) -> SamplingParams:
        """What holds for requests without sampling parameters: the model's own defaults."""
        return await self._in_thread(self._engine.default_sampling)

    async def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the engine's model, brought over once; None if it has none."""
        return await self._in_thread(self._engine.tokenizer)

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> AsyncHandle:
        """Start one request; see `Client.submit`."""
        options = RequestOptions(
            priority=priority, cache_salt=cache_salt, timeout_s=timeout_s, request_id=request_id
        )
        return await self._submit(lambda: self._engine.draft(prompt, sampling_params, options))

    async def submit_chat(
        self,
        messages: Chat,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        template: Mapping[str, object] | None = None,
    ) -> AsyncHandle:
        """Start one conversation's next answer; see `Client.submit_chat`."""
        options = RequestOptions(
            priority=priority, cache_salt=cache_salt, timeout_s=timeout_s, request_id=request_id
        )
        engine = self._engine
        return await self._submit(
            lambda: chat_draft(engine, messages, sampling_params, options, template)
        )

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, in their order; see `Client.generate`."""
        drafts = await self._in_thread(
            lambda: prompt_drafts(
                self._engine, prompts, sampling_params, priority, cache_salt, timeout_s
            )
        )
        return await self._run_batch(drafts)

    async def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        template: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; see `Client.chat`."""
        drafts = await self._in_thread(
            lambda: chat_drafts(
                self._engine, messages, sampling_params, priority, cache_salt, timeout_s, template
            )
        )
        return await self._run_batch(drafts)

    async def close(self) -> None:
        """Cancel what is live and disconnect. May be called twice."""
        await asyncio.to_thread(self._closer)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.wrap_future(self._threads.submit(work))

    async def _submit(self, make_draft: Callable[[], Draft]) -> AsyncHandle:
        """Submit from a thread. If the caller is cancelled meanwhile, so is the request."""
        engine = self._engine
        future = self._threads.submit(lambda: engine.submit(make_draft()))
        try:
            return AsyncHandle(engine, await asyncio.shield(asyncio.wrap_future(future)))
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: _cancel_submitted(engine, done))
            raise

    async def _run_batch(self, drafts: Sequence[Draft]) -> list[RequestOutput]:
        """Run drafts through the engine, as many at a time as it takes."""
        queue = BatchQueue(len(drafts))
        outputs: list[RequestOutput | None] = [None] * len(drafts)

        async def answer(index: int) -> tuple[int, LiveRequest]:
            async with await self._submit(lambda: drafts[index]) as handle:
                return index, await handle.wait_done()

        tasks: set[asyncio.Task[tuple[int, LiveRequest]]] = set()
        try:
            while not queue.is_done:
                while (index := queue.next_index(monotonic())) is not None:
                    tasks.add(asyncio.create_task(answer(index)))
                done, tasks = await _first(tasks, queue.wait_s(monotonic()))
                for index, live in [task.result() for task in done]:
                    if isinstance(live.failure, QueueFull):
                        queue.note_full(index, live.failure, monotonic())
                    elif live.failure is not None:
                        raise live.failure
                    else:
                        queue.note_answer(index)
                        outputs[index] = request_output(live)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [output for output in outputs if output is not None]


async def _first(
    tasks: "set[asyncio.Task[Answer]]", timeout_s: float | None
) -> "tuple[set[asyncio.Task[Answer]], set[asyncio.Task[Answer]]]":
    if not tasks:
        await asyncio.sleep(timeout_s or 0.0)
        return set(), set()
    return await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _cancel_submitted(engine: EngineClient, done: "Future[LiveRequest]") -> None:
    if not done.cancelled() and done.exception() is None:
        engine.cancel(done.result())
