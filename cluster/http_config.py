"""Settings of the HTTP front ends, which `stoker serve` alone has.

Read and checked by `cluster.config`, as all settings are.
"""

from typing import Annotated, Literal

from msgspec import Struct

from cluster.setting import AtLeastOne, NotNegative, PortNumber, Positive, TimeOrNone, setting


class HttpConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where HTTP is served, by how many processes, to whom, and within which limits.

    Use `cluster.config.http_config_from`, which checks; each field's text is what `--help` shows.
    """

    http: Annotated[bool, setting("Serve HTTP beside the engine's own front socket.")] = True
    host: Annotated[
        str, setting("Address to serve HTTP at. Others than loopback should have `api_keys`.")
    ] = "127.0.0.1"
    port: Annotated[PortNumber, setting("TCP port of HTTP; 0: any free one.")] = 8000
    api_servers: Annotated[
        AtLeastOne, setting("Processes that share the port. More: more streamed tokens/s.")
    ] = 1
    api_keys: Annotated[
        tuple[str, ...], setting("Keys, one of which each call must bear. Default: none is asked.")
    ] = ()
    open_paths: Annotated[
        tuple[str, ...],
        setting("Paths that need no key, beside /health and the page: /ready or /metrics, say."),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...], setting("Origins whose pages may call us from a browser; `*`: all.")
    ] = ()
    served_model_names: Annotated[
        tuple[str, ...], setting("Names of the model for callers. Default: what it was named here.")
    ] = ()

    max_body_bytes: Annotated[
        AtLeastOne, setting("Size of a request's body above which it is refused.")
    ] = 8 << 20
    max_header_bytes: Annotated[
        AtLeastOne, setting("Size of a request's line and headers above which it is refused.")
    ] = 64 << 10
    max_header_count: Annotated[
        AtLeastOne, setting("Headers of a request above which it is refused.")
    ] = 100
    read_timeout_s: Annotated[
        Positive, setting("Longest time that a request's headers, and then its body, may take.")
    ] = 30.0
    write_timeout_s: Annotated[
        Positive, setting("A reader of a stream that takes nothing for so long is cut off.")
    ] = 30.0
    keep_alive_s: Annotated[Positive, setting("Idle connections are closed after this time.")] = (
        75.0
    )
    resume_s: Annotated[
        TimeOrNone,
        setting("A call with an idempotency key is kept so long for a client that is gone."),
    ] = 30.0
    resume_bytes: Annotated[
        NotNegative,
        setting("Memory of each process for kept calls. More: more clients may come back late."),
    ] = 64 << 20
    max_prompts_per_request: Annotated[
        AtLeastOne, setting("Prompts of one call above which it is refused.")
    ] = 128
    max_outputs_per_request: Annotated[
        AtLeastOne, setting("Outputs (`n`, `best_of`) of one call above which it is refused.")
    ] = 128

    health_timeout_s: Annotated[
        Positive, setting("Time for the engine's loop to answer before /health says 503.")
    ] = 5.0
    default_timeout_s: Annotated[
        Positive | None, setting("`timeout` of calls that name none. Default: none.")
    ] = None
    unknown_fields: Annotated[
        Literal["warn", "refuse"],
        setting("What a field of a body that we do not know brings: a header and a line, or 400."),
    ] = "warn"
    encode_threads: Annotated[
        AtLeastOne, setting("Threads of each process for templates, token ids and grammars.")
    ] = 2
    tool_parser: Annotated[
        Literal["auto", "hermes", "llama3", "none"],
        setting("Format of tool calls; `auto`: by the model's chat template."),
    ] = "auto"
    otlp_endpoint: Annotated[
        str, setting("Where traces go (OTLP over HTTP). Default: nowhere.")
    ] = ""
