"""What an API server process is told when it starts."""

from msgspec import Struct

from cluster.http_config import HttpConfig


class ApiServerLaunch(Struct, frozen=True, kw_only=True):
    """All that it knows of the outside."""

    number: int
    """Among those of its cluster, from 0."""
    listen_fd: int
    """The listening socket, which it has inherited."""
    front_address: str
    """Where to dial the engine."""
    key_file: str = ""
    """If that is encrypted."""
    http: HttpConfig
    drain_s: float
    """Time that its running answers get when it is asked to end."""
    recovery_s: float = 60.0
    """How long its requests wait for another engine when theirs is gone."""
    log_level: str = "info"
    metrics_dir: str = ""
    """Where all API servers of the cluster count together; empty: each for itself."""
    siblings_dir: str = ""
    """Where they reach each other; empty: they do not."""
