"""One prompt and its `n` outputs as they grow on the client's side.

Plain state, no I/O and no locks: `FrontSession` changes it, whoever holds the session's
lock reads it. Tokens and texts are only appended to, so a reader needs no queue: it
remembers how many of each it has seen and reads what came after.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.frontend.draft import Draft
from cluster.frontend.presence import Presence
from cluster.frontend.text_stream import TextDelta, TextStream
from scheduler.request import Finish


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token that is there, then the likeliest ones."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


class LiveOutput:
    """One output: ids, text and the reason for its end."""

    def __init__(self, index: int, handle: int, stream: TextStream | None) -> None:
        """`stream` is None where the model has no tokenizer: ids only."""
        self.index = index
        self.handle = handle
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        """What each token made certain, often nothing, and after its end the rest. Joined they
        are the text so far."""
        self.logprobs: list[TokenLogprobs | None] = []
        """Of each token, where asked for."""
        self.arrivals_s = array("d")
        """When each token came, by the session's clock."""
        self.finish = Finish.NOT_YET
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = 0
        self.queue_s = 0.0
        self.prefill_s = 0.0
        self.chunks: list[tuple[int, float]] = []
        """Parts of the prompt as they were computed, if several: tokens, and seconds."""
        self.num_preemptions = 0
        self.lost_s: float | None = None
        """When its connection was lost, if it had no token since."""
        self.presence = Presence()
        self.deaths: tuple[str, ...] = ()
        """What engines have told of failures that it may be the cause of (`Suspected`)."""
        self.message = ""
        """What went wrong, if it ended by a timeout or an error."""
        self._stream = stream
        self._plain = None if stream is None else stream.plain

    @property
    def is_live(self) -> bool:
        return self.finish is Finish.NOT_YET

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def feed(self, token_id: int, now_s: float, *, adds_text: bool = True) -> bool:
        """Append one token; True if its text completes a stop string, which ends the output."""
        self.token_ids.append(token_id)
        self.arrivals_s.append(now_s)
        if self._stream is None or not adds_text:
            self.texts.append("")
            return False
        if self._plain is None:
            return self._take(self._stream.feed((token_id,)))
        self.texts.append(self._plain.feed_one(token_id))
        return False

    def end(self, finish: Finish, stop_reason: int | None = None, *, message: str = "") -> None:
        """The output ends here; text that was held back comes out, and may hold a stop string."""
        assert self.is_live
        if self._stream is None or not self._take(self._stream.flush()):
            self.finish, self.stop_reason, self.message = finish, stop_reason, message

    def _take(self, delta: TextDelta) -> bool:
        self.texts.append(delta.text)
        if delta.stopped_by is None:
            return False
        self.finish, self.stop_reason = Finish.STOP, delta.stopped_by
        return True

    def put_logprobs(self, index: int, entry: TokenLogprobs) -> None:
        """Note the log-probabilities of output token `index`, also before the token itself."""
        missing = index + 1 - len(self.logprobs)
        self.logprobs.extend([None] * missing)
        self.logprobs[index] = entry


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """What a caller submitted, and everything that came back."""

    draft: Draft
    outputs: list[LiveOutput]
    submitted_s: float
    failure: Exception | None = None
    """Why there will be no (more) answer; outputs may hold what came before."""
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position."""
    watchers: list["Watcher"] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.failure is not None or not any(output.is_live for output in self.outputs)

    def notify(self) -> None:
        for watcher in tuple(self.watchers):
            watcher(self)


Watcher = Callable[[LiveRequest], None]
"""Called after a request changed, by the thread that changed it; must neither block nor raise."""
