"""An engine in the same thread: every token comes exactly when a test says so."""

from collections.abc import Sequence
from typing import cast

from cluster.api.calls import Call, submit_all
from cluster.frontend.draft import Draft, RequestOptions, draft_of
from cluster.frontend.loop_client import LoopClient
from cluster.frontend.requests import LiveRequest, Watcher
from cluster.frontend.session import FrontSession
from cluster.frontend.tokenizer import Tokenizer
from cluster.wire import PROTOCOL_VERSION
from scheduler.request import Finish, Request, Started
from scheduler.sampling import SamplingParams
from tests.cluster.api.rig import logprob_rows
from tests.cluster.frontend.fake_engine import make_info, tokens


class LocalEngine:
    """What a `Call` needs of a `LoopClient`, without any loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.news = ""
        self._info = make_info(
            max_model_len=4096,
            vocab_size=tokenizer.vocab_size,
            end_ids=(tokenizer.eos_token_id or 0,),
            tokenizer_digest=tokenizer.files.digest,
        )
        self._session = FrontSession(PROTOCOL_VERSION)
        self._session.receive(self._info, 0.0)
        self.sent: list[Request] = []

    def submit(self, draft: Draft, watcher: Watcher | None = None) -> LiveRequest:
        live, messages = self._session.submit(draft, 0.0)
        self.sent += [message for message in messages if isinstance(message, Request)]
        return live

    def cancel(self, live: LiveRequest) -> None:
        self._session.cancel(live)

    def call(self, sampling: SamplingParams, prompt: str = "hi") -> Call:
        """A call with one prompt."""
        draft = draft_of(
            prompt,
            sampling,
            RequestOptions(),
            info=self._info,
            tokenizer=self.tokenizer,
            seed=0,
            request_id="call",
        )
        engine = cast(LoopClient, self)
        return Call("call", engine, submit_all(engine, [draft]), lambda _: None)

    def speak(self, request: Request, ids: Sequence[int], num_before: int, finish: Finish) -> None:
        """More tokens of one output."""
        started = () if num_before else (Started(handle=request.handle),)
        first = request.prompt.size + num_before
        positions = range(first, first + len(ids))
        sequence = [*request.prompt.tolist(), *[0] * num_before, *ids]
        rows = logprob_rows(request, sequence, positions)
        batch = tokens(request.handle, ids, finish, started=started, logprobs=rows)
        self._session.receive(batch, 0.0)
