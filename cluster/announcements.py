"""What a child process says of itself: one line of JSON on its standard output, then no more."""

import sys
from typing import TypeAlias

import msgspec
from msgspec import Struct


class EngineListens(Struct, frozen=True, kw_only=True, tag_field="type", tag="listens"):
    """The engine's sockets are bound."""

    front_address: str
    back_address: str


class EngineStands(Struct, frozen=True, kw_only=True, tag_field="type", tag="stands"):
    """An engine process has loaded its code and waits for its launch; `EngineListens` follows."""

    protocol: int
    version: str


class EngineRefuses(Struct, frozen=True, kw_only=True, tag_field="type", tag="refuses"):
    """The engine cannot start, for example because a port is in use."""

    message: str


class ApiServerListens(Struct, frozen=True, tag_field="type", tag="api_server_listens"):
    """An API server takes connections."""


class ClusterReady(Struct, frozen=True, kw_only=True, tag_field="type", tag="ready"):
    """Every group takes requests."""

    front_address: str
    """For clients."""
    engine_id: str
    model: str
    key_file: str = ""
    """Path of the file that clients need to dial an encrypted front_address."""
    http_address: str = ""
    """Of the HTTP routes; empty: none are served."""


class ClusterFailed(Struct, frozen=True, kw_only=True, tag_field="type", tag="failed"):
    """The cluster did not come up, and nothing of it is left."""

    message: str


OfEngine: TypeAlias = EngineStands | EngineListens | EngineRefuses
OfCluster: TypeAlias = ClusterReady | ClusterFailed


def announce(message: OfEngine | OfCluster | ApiServerListens) -> None:
    """Say it; whoever should have heard may be gone."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        return


def read_engine_line(line: bytes) -> OfEngine:
    """Raises msgspec.DecodeError for anything else, such as the empty line of a dead process."""
    return msgspec.json.decode(line, type=OfEngine)


def read_cluster_line(line: bytes) -> OfCluster:
    """Raises msgspec.DecodeError for anything else, such as the empty line of a dead process."""
    return msgspec.json.decode(line, type=OfCluster)
