"""Collects the facts of this host, and of a Ray cluster's nodes, into one scene.

What concerns other nodes is asked by a process of its own (`cluster.doctor.nodes_main`), since
neither Ray's connecting nor a broken node can be waited for with a limit: the process is killed
when time is over, and what it has told by then is what is known.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from cluster.doctor.checks import CHECKS, examine
from cluster.doctor.collect import Question, collect_host
from cluster.doctor.nodes_task import NodesTask
from cluster.doctor.scene import Asked, Finding, Host, Scene
from cluster.doctor.survey import Survey
from cluster.engine_config import EngineConfig
from worker.estimate import DTYPE_BYTES

NODES_COMMAND = (sys.executable, "-P", "-m", "cluster.doctor.nodes_main")

LIMIT_S = 12.0
"""For everything that concerns other nodes. More: more pairs of nodes are measured."""
KNOCK_S = 2.0
LOOK_S = 0.1

WRONG_TOKEN = "InvalidAuthToken"
"""What Ray writes each second, while it tries for many."""


START_CHECKS = ("versions", "model", "shared memory", "limits", "disk", "variables")
"""That cost a start nothing, and that it cannot disturb itself; hosts with ranks also `memory`."""


def asked_of(config: EngineConfig, *, device: str) -> Asked:
    """What hosts must bear, of a config."""
    widths = {"int8": 1.0, "auto": None}
    kind = config.quantization if config.quantization != "none" else config.dtype
    return Asked(
        bytes_per_weight=widths.get(kind, DTYPE_BYTES.get(kind)),
        num_groups=config.num_groups,
        num_ranks=config.num_ranks // config.num_groups,
        device=device,
        uses_ray=bool(config.ray_address),
        shares_weights=config.warm_weights and device == "cpu" and config.ops != "reference",
    )


def question_of(config: EngineConfig, model_dir: Path | None) -> Question:
    """What this host is asked about, as the leader of a cluster to be."""
    temporary = config.socket_dir or tempfile.gettempdir()
    return Question(
        node=socket.gethostname(),
        model_dir="" if model_dir is None else str(model_dir),
        disk_paths=tuple(dict.fromkeys((temporary, os.path.abspath(config.models_dir)))),
        own_sockets=tuple(a for a in (config.front_address, config.back_address) if a),
        looks_for_stale_ray=config.backend == "ray",
    )


def examine_here(config: EngineConfig, model_dir: Path | None, *, device: str) -> Scene:
    """This host alone."""
    host = collect_host(question_of(config, model_dir))
    return Scene(asked=asked_of(config, device=device), here=host, hosts=(host,))


def examine_start(config: EngineConfig, model_dir: Path) -> list[Finding]:
    """The cheap checks of a start, on the engine's host, while other processes are started."""
    question = msgspec.structs.replace(
        question_of(config, model_dir), own_sockets=(), looks_for_stale_ray=False
    )
    host = collect_host(question)
    scene = Scene(asked=asked_of(config, device=config.device), here=host, hosts=(host,))
    names = START_CHECKS if config.ray_address else (*START_CHECKS, "memory")
    return examine(scene, [check for check in CHECKS if check.name in names])


def examine_nodes(
    config: EngineConfig, model_dir: Path | None, *, device: str, limit_s: float = LIMIT_S
) -> Scene:
    """This host, and every node of the Ray at `ray_address`."""
    deadline = time.monotonic() + limit_s
    asked = asked_of(config, device=device)
    question = question_of(config, model_dir)
    known, problem = Survey(), _knock(config.ray_address)
    here = collect_host(question)
    if not problem:
        # Each node is asked about itself, and none about sockets of the engine.
        task = NodesTask(
            address=config.ray_address,
            question=msgspec.structs.replace(question, own_sockets=()),
            back_address=config.back_address,
            limit_s=deadline - time.monotonic() - 1.0,
            parent_pid=os.getpid(),
        )
        known, problem = ask_nodes(task, deadline)
    return scene_of(asked, here, known, problem)


def scene_of(asked: Asked, here: Host, known: Survey, problem: str) -> Scene:
    """What was learnt, as a scene; without nodes this host stands for them.

    A node of which nothing was learnt when time was up is silent as well.
    """
    heard = {host.node for host in known.hosts} | known.silent.keys()
    unheard = [room.node for room in known.rooms if room.is_alive and room.node not in heard]
    return Scene(
        asked=asked,
        here=here,
        hosts=known.hosts or (here,),
        rooms=known.rooms,
        paths=known.paths,
        pairs=known.pairs,
        silent=known.silent | dict.fromkeys(unheard, "time was up before its facts came"),
        ray_problem=problem,
    )


def ask_nodes(task: NodesTask, deadline: float) -> tuple[Survey, str]:
    """Let a process examine the nodes; what it knew when it ended, and what kept it from more."""
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            NODES_COMMAND, stdin=subprocess.PIPE, stdout=told, stderr=said, process_group=0
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(msgspec.json.encode(task))
        code = _wait(process, said.fileno(), deadline)
        told.seek(0)
        said.seek(0)
        return read_survey(told.read(), said.read().decode(errors="replace"), code)


def _wait(process: "subprocess.Popen[bytes]", said_fd: int, deadline: float) -> int | None:
    """The exit code; None if it had to be killed, at `deadline` or because it tries in vain."""
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_S)
        if WRONG_TOKEN.encode() in os.pread(said_fd, 1 << 20, 0):
            break
    process.kill()
    process.wait()
    return None


def read_survey(told: bytes, said: str, code: int | None) -> tuple[Survey, str]:
    """The last survey that was told in full, and why there was none, or none that is complete."""
    known = Survey()
    for line in told.splitlines():
        with contextlib.suppress(msgspec.DecodeError):  # cut off in the middle
            known = msgspec.json.decode(line, type=Survey)
    if known.is_complete or known.rooms:
        return known, ""
    if WRONG_TOKEN in said:
        return known, (
            "Ray does not take our token | give this process the token of the head: "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, as for `ray start`"
        )
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    if code is None:
        return known, f"Ray takes connections, but lets nobody in within the time limit. {last}"
    return known, last or f"the examination ended with exit code {code}"


def _knock(address: str) -> str:
    """Why nobody answers at HOST:PORT; empty if somebody does, or `address` is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
    except OSError as error:
        return f"nobody answers at {address}: {error.strerror or error}"
    return ""
