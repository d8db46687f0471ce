"""Collects the facts of this host, and of a Ray cluster's nodes, into one scene.

What concerns other nodes is asked by a process of its own (`cluster.doctor.nodes_main`), since
neither Ray's connecting nor a broken node can be waited for with a limit: the process is killed
when time is over, and what it has told by then is what is known.
"""

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cluster.config import EngineConfig
from cluster.doctor.collect import Question, collect_host
from cluster.doctor.scene import Asked, Scene


def asked_of(config: EngineConfig, *, device: str) -> Asked:
    """What hosts must bear, of a config."""
    return Asked(
        num_groups=config.num_groups,
        num_ranks=config.num_ranks // config.num_groups,
        device=device,
        uses_ray=bool(config.ray_address),
    )


def question_here(
    config: EngineConfig, model_dir: Path | None, known_ray_pids: Sequence[int] = ()
) -> Question:
    """What this host is asked about, as the leader of a cluster to be."""
    name = socket.gethostname()
    temporary = config.socket_dir or tempfile.gettempdir()
    return Question(
        node=name,
        model_dir="" if model_dir is None else str(model_dir),
        disk_paths=tuple(dict.fromkeys((temporary, os.path.abspath(config.models_dir)))),
        own_sockets=tuple(a for a in (config.front_address, config.back_address) if a),
        known_ray_pids=tuple(known_ray_pids),
        looks_for_stale_ray=config.backend == "ray" and not config.ray_address,
    )


def examine_here(config: EngineConfig, model_dir: Path | None, *, device: str) -> Scene:
    """This host alone."""
    host = collect_host(question_here(config, model_dir))
    return Scene(asked=asked_of(config, device=device), hosts=(host,), silent={})
