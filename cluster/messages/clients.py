"""What a client and the engine tell each other first, last, and about requests by their labels."""

from msgspec import Struct


class ClientHello(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="client_hello"
):
    """The first message of a client, answered by `ServerInfo` once the engine is ready.

    Until then the answer is `EngineStarting`, and `ServerInfo` follows by itself.
    """

    protocol: int
    """`cluster.wire.PROTOCOL_VERSION` of the client."""
    label: str = ""
    """For the engine's log; need not be unique."""


class GenerationDefaults(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the model's generation_config.json says where a request says nothing.

    None: the file says nothing, so `SamplingParams`' own default holds.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


class ServerInfo(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="server_info"
):
    """What a client must know to build requests; sent when a token can be made."""

    protocol: int
    engine_id: str
    """Changes when the engine restarts, after which old handles mean nothing."""
    model: str
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    """Token ids are 0 to this minus one."""
    block_size: int
    """Tokens per KV block; cached prefixes are whole blocks."""
    max_num_seqs: int
    """Requests that run at once in one group."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end an output unless `ignore_eos`; to be put into `Request.end_ids`."""
    tokenizer_digest: str = ""
    """`TokenizerFiles.digest` of what `TokenizerRequest` would bring; empty: it has none."""
    defaults: GenerationDefaults = GenerationDefaults()
    num_crashes: int = 0
    """Engine processes of this cluster that ended unasked before this one."""
    last_crash: str = ""
    """How the last of them did."""
    suspect_after: int = 0
    """A request that was there at so many of them, with no token in between, must `AskTurn`;
    0: none must."""


class EngineStarting(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="engine_starting"
):
    """Not ready yet; `ServerInfo` follows when it is. Requests are refused meanwhile."""

    message: str


class EngineStopping(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="engine_stopping"
):
    """Sent to each client when the engine stops taking requests.

    Running requests go on for at most `drain_s`; what then still runs ends with an abort.
    """

    message: str
    drain_s: float = 0.0
    hands_over: bool = False
    """The connection ends now, and no request does: the next engine at this address goes on with
    what is submitted to it again."""


class Refusal(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="refusal"
):
    """The engine cannot talk to this peer, or could not read what it sent."""

    reason: str
    """One of: protocol (versions differ), unreadable (not one of our messages), no_hello
    (spoke before its hello), too_slow (was cut off), no_tokenizer, stranger (a worker that is
    not, or no longer, one of ours)."""
    message: str


class AskTurn(Struct, frozen=True, tag_field="type", tag="ask_turn"):
    """I have a request that may be the cause of the ends of engines: tell me when to submit it
    under this handle. Answered by `YourTurn`, to one request after the other."""

    handle: int


class YourTurn(Struct, frozen=True, tag_field="type", tag="your_turn"):
    """Submit the request now, or `Abort` it. Another one's turn comes when it has a token or has
    ended."""

    handle: int


class TokenizerRequest(Struct, frozen=True, tag_field="type", tag="tokenizer_request"):
    """Send me the tokenizer's files; answered by `TokenizerFiles`."""


class CancelByLabel(Struct, frozen=True, tag_field="type", tag="cancel_by_label"):
    """End the live requests with this label, whosever they are. Answered by `Cancelled`.

    A label may be several names with a space between them, of which one must be this. Behind
    the last one `-` and a number below 1000 may stand: so the outputs of one call are told
    apart.
    Whoever submitted them is told that they ended with an abort.
    """

    label: str


class Cancelled(Struct, frozen=True, tag_field="type", tag="cancelled"):
    """Answer to `CancelByLabel`."""

    label: str
    count: int
    """Requests that were live, and are not any more."""
