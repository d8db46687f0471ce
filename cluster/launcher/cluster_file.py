"""The file of `stoker up`: which machines, how to get there, and what to serve from them."""

import re
import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

from cluster.config import config_from, http_config_from, is_http_setting
from scheduler.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

OURS = ("backend", "ray_address", "key_file")
"""Settings that `stoker up` gives itself."""


class Nodes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines, and how they are reached."""

    head: str
    """Address of the one that runs the engine core and HTTP; all others must reach it."""
    workers: tuple[str, ...] = ()
    """Addresses of the others."""
    ssh_user: str
    ssh_key: str
    """Path of the private key, here; the head gets it too, to reach the workers."""
    bin: str = "~/.stoker/venv/bin"
    """Folder, on each node, with `stoker`, `ray` and `python`."""
    source: str = ""
    """Folder, here, of Stoker's source, installed on nodes whose `bin` has none. Empty: Stoker
    must be there."""
    ray_port: int = 6379
    num_cpus: int | None = None
    """CPUs of each node for ranks, one each. Default: all that it has."""
    ray_options: tuple[str, ...] = ()
    """More options of `ray start`, on each node."""
    start_timeout_s: float = 300.0
    """Longest wait for Ray on all nodes; installing counts."""

    @property
    def all(self) -> tuple[str, ...]:
        return (self.head, *self.workers)


class ClusterFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it."""

    name: str = "stoker"
    """Of Ray's cluster, and of the folders in ~/.stoker, here and on the nodes."""
    nodes: Nodes
    serve: dict[str, object] = {}
    """Settings of `stoker serve`."""

    def settings(self) -> dict[str, object]:
        """Those of `stoker serve`, with addresses that other machines reach."""
        given = {
            "host": self.nodes.head,
            "front_address": f"tcp://{self.nodes.head}:0",
            "drain_s": 25.0,
            "models_dir": "../models",  # stays when the cluster goes, which is in the folder beside
            **self.serve,
        }
        return {**given, "backend": "ray", "ray_address": "auto", "key_file": "key"}


def read_cluster_file(path: Path) -> ClusterFile:
    """Read and check the file.

    Raises:
        ConfigError: it cannot be read, or says what cannot be; the message says where.
    """
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), ClusterFile)
    except OSError as error:
        raise ConfigError(f"cannot read the cluster file {path}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    if not NAME.fullmatch(found.name):
        raise ConfigError(f"{path}: name={found.name!r} is not of letters, digits, - and _ alone")
    if len(set(found.nodes.all)) < len(found.nodes.all):
        raise ConfigError(f"{path}: a node is named twice: {', '.join(found.nodes.all)}")
    if ours := sorted(set(OURS) & set(found.serve)):
        raise ConfigError(f"{path}: [serve] may not set {', '.join(ours)}: `stoker up` does")
    settings = found.settings()
    config_from({k: v for k, v in settings.items() if not is_http_setting(k)})
    http_config_from({k: v for k, v in settings.items() if is_http_setting(k)})
    return found
