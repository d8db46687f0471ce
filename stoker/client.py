"""A running cluster from Python: submit prompts, stream or await their answers.

Loads neither torch nor ray nor transformers, and needs no model directory.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from queue import Empty, SimpleQueue
from time import monotonic

from cluster.frontend.draft import Draft, Prompt, RequestOptions
from cluster.frontend.engine_client import ClientConfig, EngineClient, seeds_from
from cluster.frontend.errors import QueueFull
from cluster.frontend.requests import LiveRequest
from cluster.frontend.tokenizer import Tokenizer
from cluster.messages.changes import ClusterUpgraded, ModelReloaded, NodeDrained, Scaled
from cluster.messages.clients import ServerInfo
from cluster.messages.reports import Status
from scheduler.sampling import SamplingParams
from stoker.batch import BatchQueue
from stoker.outputs import Piece, RequestOutput
from stoker.prompts import Chat, chat_draft, chat_drafts, prompt_drafts
from stoker.reader import PieceReader, request_output
from stoker.running import key_file_for

OnAnswer = Callable[[RequestOutput], None]
"""Told of each answer of a batch when it is there, in the order of their ends."""


class Handle:
    """One submitted request. Any thread may use it; closing or leaving `with` cancels it."""

    def __init__(self, engine: EngineClient, live: LiveRequest) -> None:
        self._engine = engine
        self._live = live

    @property
    def request_id(self) -> str:
        return self._live.draft.request_id

    @property
    def is_done(self) -> bool:
        return self._live.is_done

    def result(self, timeout_s: float | None = None) -> RequestOutput:
        """Wait for the whole answer.

        Raises:
            WaitTimedOut: it was not there within `timeout_s`; the request goes on.
            InvalidRequest, QueueFull, EngineLost, ...: there is no answer; the error says why.
        """
        self._engine.wait_done(self._live, timeout_s)
        if self._live.failure is not None:
            raise self._live.failure
        return request_output(self._live)

    def snapshot(self) -> RequestOutput:
        """What is there by now."""
        with self._engine.lock:
            return request_output(self._live)

    def cancel(self) -> None:
        """End the request with what it has so far (`finish_reason` "abort")."""
        self._engine.cancel(self._live)

    def __iter__(self) -> Iterator[Piece]:
        """Pieces from the beginning, as they come; a slow reader gets larger ones.

        Raises:
            EngineLost, ...: after the pieces that came before it happened.
        """
        reader = PieceReader(self._live)
        while not reader.is_at_end:
            yield from self._next_pieces(reader)
        if self._live.failure is not None:
            raise self._live.failure

    def _next_pieces(self, reader: PieceReader) -> list[Piece]:
        pieces: list[Piece] = []

        def has_news() -> bool:
            pieces.extend(reader.read())
            return bool(pieces)

        self._engine.wait_for(self._live, has_news, None)
        return pieces

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Client:
    """A connection to a running engine. Any number of threads may share one.

    It reconnects by itself: requests live when the engine is lost go on, without a token lost or
    doubled, with the one that listens at the address next; none within `recovery_s`: they fail
    with `EngineLost`. Closing cancels what is live.

    Args:
        address: of the engine's front socket, as `stoker serve` prints it: tcp://HOST:PORT or
            ipc://PATH.
        connect_timeout_s: longest wait for an engine that is ready, at each call.
        key_file: of an encrypted tcp:// address, as `stoker serve` names it. None: that of
            this user's cluster there, if it runs on this machine; else STOKER_KEY_FILE's.
        seed: where the seeds of requests without one come from; None: from the system's chance.
        recovery_s: how long requests wait for another engine. 0: they fail when theirs is lost.
        is_over: whether no engine will ever come again, so that there is no use in waiting.
    Raises:
        AddressError: the address cannot be dialled.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 10.0,
        label: str = "",
        key_file: str | PathLike[str] | None = None,
        seed: int | None = None,
        recovery_s: float = 60.0,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        config = ClientConfig(
            address=address,
            connect_timeout_s=connect_timeout_s,
            label=label,
            key_file=key_file_for(address, key_file),
            recovery_s=recovery_s,
        )
        self._engine = EngineClient(config, draw_seed=seeds_from(seed), is_over=is_over)
        # Also closes a client that is dropped, and at the interpreter's end.
        self._closer = weakref.finalize(self, self._engine.close)

    @property
    def address(self) -> str:
        return self._engine.config.address

    def info(self, timeout_s: float | None = None) -> ServerInfo:
        """What the engine serves; waits until it is ready.

        Raises:
            EngineUnreachable: none was ready in time.
        """
        return self._engine.info(timeout_s)

    def status(self, timeout_s: float | None = None) -> Status:
        """How the engine is: groups, queue, counters."""
        return self._engine.status(timeout_s)

    def scale(self, num_groups: int | None, timeout_s: float | None = None) -> Scaled:
        """Have so many worker groups from now on; None: as many as load needs, between the
        cluster's `min_groups` and `max_groups`. Groups come and go meanwhile; no stream ends."""
        return self._engine.scale(num_groups, timeout_s)

    def drain(
        self, node: str, *, undo: bool = False, timeout_s: float | None = None
    ) -> NodeDrained:
        """Take every worker group off a node at once, and start none there until it is undone.
        No stream ends; asked again, the answer says how far it is."""
        return self._engine.drain(node, undo=undo, timeout_s=timeout_s)

    def reload(
        self, model: str = "", *, only_asks: bool = False, timeout_s: float | None = None
    ) -> ModelReloaded:
        """Let one group after the other come back with the weights in a folder of the engine's
        host, or, without one, with what is in the same folder now. No stream ends.

        Returns at once; `only_asks` says how far it is. `refusal` says why it was not begun,
        `failure` why the old weights are back.
        """
        return self._engine.reload(model, only_asks=only_asks, timeout_s=timeout_s)

    def upgrade(
        self, *, only_asks: bool = False, timeout_s: float | None = None
    ) -> ClusterUpgraded:
        """Replace the engine core, every worker and every API server by new processes, which run
        the code that is installed now. No stream ends.

        Returns at once; `only_asks` says how far it is.
        """
        return self._engine.upgrade(only_asks=only_asks, timeout_s=timeout_s)

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds for requests without sampling parameters: the model's own defaults."""
        return self._engine.default_sampling()

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the engine's model, brought over once; None if it has none."""
        return self._engine.tokenizer()

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Handle:
        """Start one request and return at once.

        Args:
            prompt: a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            timeout_s: seconds after which the engine ends it wherever it is.
            request_id: your own name for it, for logs.
        Raises:
            InvalidRequest: it cannot be served.
            EngineUnreachable: no engine was ready within the connect timeout.
        """
        options = RequestOptions(
            priority=priority, cache_salt=cache_salt, timeout_s=timeout_s, request_id=request_id
        )
        return self._submit(self._engine.draft(prompt, sampling_params, options))

    def submit_chat(
        self,
        messages: Chat,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        template: Mapping[str, object] | None = None,
    ) -> Handle:
        """Start one conversation's next answer and return at once; see `chat` and `submit`."""
        options = RequestOptions(
            priority=priority, cache_salt=cache_salt, timeout_s=timeout_s, request_id=request_id
        )
        return self._submit(chat_draft(self._engine, messages, sampling_params, options, template))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        on_answer: OnAnswer | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, in their order. A batch may be larger than the engine's queue.

        All prompts are checked before any is sent; the first that fails ends the batch.

        Args:
            sampling_params: for all, or one for each prompt; None: the model's defaults.
            priority: for all, or one for each prompt.
        Raises:
            InvalidRequest: a prompt or a parameter that cannot be served.
            EngineLost, ...: the batch could not be finished.
        """
        drafts = prompt_drafts(
            self._engine, prompts, sampling_params, priority, cache_salt, timeout_s
        )
        return self._run_batch(drafts, on_answer)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        on_answer: OnAnswer | None = None,
        template: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        Args:
            messages: maps with "role" and "content".
            sampling_params: as in `generate`; None also fills the context, as `max_tokens=None`.
            template: arguments of `Tokenizer.encode_chat`, such as `tools`,
                `continue_final_message` or `template_options`.
        """
        drafts = chat_drafts(
            self._engine, messages, sampling_params, priority, cache_salt, timeout_s, template
        )
        return self._run_batch(drafts, on_answer)

    def close(self) -> None:
        """Cancel what is live and disconnect. May be called twice."""
        self._closer()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, draft: Draft) -> Handle:
        return Handle(self._engine, self._engine.submit(draft))

    def _run_batch(
        self, drafts: Sequence[Draft], on_answer: OnAnswer | None
    ) -> list[RequestOutput]:
        batch = _Batch(self._engine, drafts, on_answer)
        try:
            return batch.run()
        finally:
            batch.cancel()


class _Batch:
    """Runs drafts through an engine, as many at a time as it takes."""

    def __init__(
        self, engine: EngineClient, drafts: Sequence[Draft], on_answer: OnAnswer | None
    ) -> None:
        self._engine = engine
        self._drafts = drafts
        self._on_answer = on_answer
        self._queue = BatchQueue(len(drafts))
        self._live: dict[int, LiveRequest] = {}
        self._done: SimpleQueue[int] = SimpleQueue()
        self._outputs: list[RequestOutput | None] = [None] * len(drafts)

    def run(self) -> list[RequestOutput]:
        while not self._queue.is_done:
            while (index := self._queue.next_index(monotonic())) is not None:
                self._start(index)
            try:
                self._take(self._done.get(timeout=self._queue.wait_s(monotonic())))
            except Empty:
                continue
        return [output for output in self._outputs if output is not None]

    def cancel(self) -> None:
        """End what is still live, which is nothing after a `run` that went well."""
        for live in self._live.values():
            self._engine.cancel(live)

    def _start(self, index: int) -> None:
        def tell(live: LiveRequest) -> None:
            if live.is_done:
                self._done.put(index)

        self._live[index] = self._engine.submit(self._drafts[index], tell)

    def _take(self, index: int) -> None:
        live = self._live.pop(index, None)
        if live is None:
            return  # told twice
        if isinstance(live.failure, QueueFull):
            self._queue.note_full(index, live.failure, monotonic())
            return
        if live.failure is not None:
            raise live.failure
        self._queue.note_answer(index)
        output = self._outputs[index] = request_output(live)
        if self._on_answer is not None:
            self._on_answer(output)
