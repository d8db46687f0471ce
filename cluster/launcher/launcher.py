"""Up and down, step after step; each with a limit, and an error that names the machine."""

import contextlib
import json
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from cluster.config import config_from, is_http_setting
from cluster.errors import RemoteError, StartFailed
from cluster.launcher.cluster_file import ClusterFile
from cluster.launcher.ray_file import (
    NOT_SOURCE,
    exports,
    folder_on_nodes,
    ray_environment,
    ray_file,
)
from cluster.launcher.ray_log import last_words
from cluster.launcher.remote import Remote

QUICK_S = 30.0
"""For a command that only looks."""

COPY_S = 120.0
RAY_STOP_S = 60.0
RAY_DOWN_S = 120.0
GRACE_S = 30.0
"""For processes to be gone that were told to end."""

TELL_WITHOUT_VENV = "python3 -c 'import ensurepip' 2>/dev/null || echo python3-venv"

RAY_FOLDER = Path("/tmp/ray")
"""Ray's own, on every machine."""

TAIL_LINES = 25

OURS = (
    r"raylet|gcs_server|ray::|ray/_private|ray/dashboard|ray/autoscaler|ray start|stoker serve"
    r"|-m cluster\."
)
"""How command lines look of what a cluster runs on a node."""

Say = Callable[[str], None]


class Up(Struct, frozen=True, kw_only=True):
    """A cluster that takes requests."""

    front: str
    http: str
    folder: Path
    """Here: `api_key` (unless keys were given) and `key`, for clients of the front address."""


class Launcher:
    """One cluster file at work. `say` is told what is being done, a line each."""

    def __init__(self, file: ClusterFile, state: Path, say: Say) -> None:
        """`state`: a private folder of this machine, for secrets and logs; made if need be."""
        self._file = file
        self._state = state
        self._say = say
        self._there = folder_on_nodes(file)
        self._on = {
            host: Remote(host=host, user=file.nodes.ssh_user, key=Path(file.nodes.ssh_key))
            for host in file.nodes.all
        }
        self._head = self._on[file.nodes.head]
        self._ray = exports(ray_environment(file))

    def up(self) -> Up:
        """Bring Ray up on all nodes, and Stoker over them.

        Raises:
            RemoteError: a machine cannot be reached, or lacks something.
            StartFailed: Ray or Stoker did not come up; the message has the end of its log. What
                runs already is left to `down`.
        """
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._say(f"looking at {len(self._on)} nodes")
        self._on_all(self._look, list(self._on))
        self._ray_up()
        self._wait_for_nodes()
        return self._serve()

    def down(self) -> None:
        """End Stoker, then Ray, on every node, and see that nothing is left.

        Also of an `up` that failed halfway, and on all nodes that can be reached if some cannot.

        Raises:
            RemoteError: something is left, or a machine cannot be asked; `down` may be tried again.
        """
        with contextlib.suppress(RemoteError):  # the head is asked again below
            self._end_head()
        self._say("ending Ray on every node")
        self._on_all(self._end_node, [*self._file.nodes.workers, self._head.host])
        for ending in ("state", "lock"):  # of `ray up`, here
            (RAY_FOLDER / f"cluster-{self._file.name}.{ending}").unlink(missing_ok=True)
        shutil.rmtree(self._state, ignore_errors=True)

    # --- up ---

    def _look(self, node: Remote) -> None:
        """Whether it can be reached, and has or can get what it needs."""
        if lacking := node.run(self._lacking(), timeout_s=QUICK_S).split():
            raise RemoteError(f"{node.host} has no {', '.join(lacking)}")
        left = node.run(_left(), timeout_s=QUICK_S).strip()
        if left:
            raise RemoteError(
                f"{node.host} runs a cluster already:\n{left}\nEnd it first (`stoker down`, or "
                "`ray stop` there)"
            )

    def _lacking(self) -> str:
        """Prints what has to be there before, and is not."""
        nodes = self._file.nodes
        stoker = f"{nodes.bin}/stoker"
        absent = f"{{ {_tell_without('python3', 'c++')}; {TELL_WITHOUT_VENV}; }}"
        to_install = absent if nodes.source else f"echo {stoker}"
        return f"{_tell_without('rsync')}; test -x {stoker} || {to_install}"

    def _ray_up(self) -> None:
        token = self._state / "ray_token"
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32))
        config = self._state / "ray.yaml"
        config.write_text(json.dumps(ray_file(self._file, str(token), self._source()), indent=2))
        self._say(f"ray up (its log: {self._state / 'ray.log'})")
        words = ("up", "-y", "--no-config-cache", str(config))
        if not self._run_ray(*words, timeout_s=self._file.nodes.start_timeout_s):
            log = (self._state / "ray.log").read_text(encoding="utf-8", errors="replace")
            raise StartFailed(f"`ray up` failed:\n{last_words(log, TAIL_LINES)}")

    def _source(self) -> str:
        """A copy of the source alone: Ray reads all of a folder that it takes to the nodes, also
        what it leaves out, and beside the source there may be environments and models."""
        given = self._file.nodes.source
        if not given:
            return ""
        copy = self._state / "source"
        ends = (f"{Path(given).expanduser()}/", str(copy))
        without = [f"--exclude={pattern}" for pattern in NOT_SOURCE]
        line = ["rsync", "--archive", "--delete", *without, *ends]
        try:
            subprocess.run(line, check=True, capture_output=True, timeout=COPY_S)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error).encode()
            raise RemoteError(
                f"cannot copy Stoker's source {given}: {said.decode(errors='replace').strip()}"
            ) from error
        return str(copy)

    def _run_ray(self, *words: str, timeout_s: float) -> bool:
        """Whether `ray ...` on this machine ended well and in time; its log is kept."""
        # Unbuffered: what Ray says and what the commands say that it runs come in their order.
        ray = [sys.executable, "-u", "-m", "ray.scripts.scripts"]
        with (self._state / "ray.log").open("ab") as log:
            try:
                done = subprocess.run(
                    [*ray, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                log.write(f"\nno end of `ray {words[0]}` in {timeout_s:g} s\n".encode())
                return False
        return done.returncode == 0

    def _wait_for_nodes(self) -> None:
        nodes = self._file.nodes
        self._say(f"waiting for {len(nodes.all)} nodes")
        limit_s = nodes.start_timeout_s
        command = (
            f"{self._ray}; {nodes.bin}/python -m cluster.ray_nodes_main "
            f"{limit_s:g} {' '.join(nodes.all)}"
        )
        try:
            self._say("they are:\n" + self._head.run(command, timeout_s=limit_s + QUICK_S).rstrip())
        except RemoteError as error:
            raise StartFailed("\n".join([str(error), *self._ray_logs_of_workers()])) from error

    def _ray_logs_of_workers(self) -> Iterator[str]:
        for host in self._file.nodes.workers:
            path = f"{self._there}/ray.log"
            with contextlib.suppress(RemoteError):
                said = self._on[host].run(f"tail -n {TAIL_LINES} {path}", timeout_s=QUICK_S)
                yield f"The end of {path} on {host}:\n{said.rstrip()}"

    def _serve(self) -> Up:
        self._say(f"stoker serve on {self._head.host} (its log there: {self._there}/serve.log)")
        settings = {**self._file.settings(), "api_keys": self._api_keys()}
        self._head.write(f"{self._there}/serve.toml", _as_toml(settings).encode())
        limit_s = config_from(self._engine_settings()).start_timeout_s
        stoker = f"{self._file.nodes.bin}/stoker"
        self._head.run(
            f"cd {self._there}; rm -f serve.out; {self._ray}; "
            f"setsid nohup {stoker} serve --config serve.toml >serve.out 2>serve.log </dev/null & "
            f"echo $! >{self._there}/serve.pid",
            timeout_s=QUICK_S,
        )
        try:
            said = self._head.run(_wait_for_serve(self._there, limit_s), timeout_s=limit_s + 30)
        except RemoteError as error:
            log = self._head.run(f"tail -n {TAIL_LINES} {self._there}/serve.log", timeout_s=QUICK_S)
            raise StartFailed(
                f"stoker serve did not come up on {self._head.host}:\n{log}"
            ) from error
        front, http = said.split()[:2]
        key = self._head.run(f"cat {self._there}/key 2>/dev/null || true", timeout_s=QUICK_S)
        if key:
            _write_private(self._state / "key", key)
        return Up(front=front, http=http, folder=self._state)

    def _api_keys(self) -> list[str]:
        given = self._file.serve.get("api_keys")
        if given:
            return [str(key) for key in msgspec.convert(given, list[str])]
        path = self._state / "api_key"
        if not path.exists():
            _write_private(path, secrets.token_urlsafe(24) + "\n")
        return [path.read_text().strip()]

    def _engine_settings(self) -> dict[str, object]:
        settings = self._file.settings()
        return {name: value for name, value in settings.items() if not is_http_setting(name)}

    # --- down ---

    def _end_head(self) -> None:
        drain_s = config_from(self._engine_settings()).drain_s + GRACE_S
        self._say(f"ending stoker serve on {self._head.host}")
        self._head.run(_end_serve(self._there, drain_s), timeout_s=drain_s + QUICK_S)
        config = self._state / "ray.yaml"
        if config.exists():
            self._say("ray down")
            self._run_ray("down", "-y", str(config), timeout_s=RAY_DOWN_S)

    def _end_node(self, node: Remote) -> None:
        """End what this cluster runs there; one without its folder has none of it."""
        bin_, there = self._file.nodes.bin, self._there
        if not node.run(f"ls -d {there} || true", timeout_s=QUICK_S):
            return
        stop = f"{bin_}/ray stop --grace-period=10 || {bin_}/ray stop --force || true"
        node.run(f"{self._ray}; {{ {stop}; }} >/dev/null 2>&1", timeout_s=RAY_STOP_S)
        node.run(f"{_end_joining(self._file)} || true", timeout_s=QUICK_S)
        deadline = time.monotonic() + GRACE_S
        while left := node.run(_left(), timeout_s=QUICK_S).strip():
            if time.monotonic() > deadline:
                raise RemoteError(f"on {node.host} there still runs:\n{left}")
            time.sleep(1.0)
        node.run(_remove_files(there), timeout_s=QUICK_S)

    def _on_all(self, act: Callable[[Remote], None], hosts: Sequence[str]) -> None:
        """Do it on each at once; one error that has all of theirs."""
        problems = []
        with ThreadPoolExecutor(len(hosts)) as pool:
            for done in [pool.submit(act, self._on[host]) for host in hosts]:
                try:
                    done.result()
                except RemoteError as error:
                    problems.append(str(error))
        if problems:
            raise RemoteError("\n".join(problems))


def _tell_without(*programs: str) -> str:
    names = " ".join(programs)
    return f"for name in {names}; do command -v $name >/dev/null || echo $name; done"


def _left() -> str:
    """Prints the command lines of what a cluster of this user runs on a node."""
    return (
        f"ps -u $(id -u) -o pid=,args= -ww | grep -E '{OURS}' | grep -v grep | cut -c1-150 || true"
    )


def _end_serve(folder: str, limit_s: float) -> str:
    return (
        f"cd {folder} 2>/dev/null && test -e serve.pid || exit 0; pid=$(cat serve.pid); "
        f"kill -TERM $pid 2>/dev/null || exit 0; "
        f"for turn in $(seq {int(limit_s * 2)}); do kill -0 $pid 2>/dev/null || exit 0; "
        "sleep 0.5; done; kill -KILL -- -$pid"
    )


def _end_joining(file: ClusterFile) -> str:
    """Ends what brought a worker into Ray, which `ray stop` may leave waiting for ever.

    The brackets keep it from ending the shell that runs it.
    """
    line = f"[r]ay start --block --address={re.escape(file.nodes.head)}:{file.nodes.ray_port} "
    return f"pkill -u $(id -u) -f {shlex.quote(line)}"


def _remove_files(folder: str) -> str:
    """Removes those of this start; the token is the first of them, so Ray's are newer."""
    ours = f"-maxdepth 1 -user $(id -u) -newer {folder}/ray_token -exec rm -rf {{}} +"
    return (
        f"find {RAY_FOLDER} -mindepth 1 {ours} 2>/dev/null; rmdir {RAY_FOLDER} 2>/dev/null; "
        f"find /tmp -name 'ray_ssh_*' {ours} 2>/dev/null; "
        f"rm -rf {folder} ~/ray_bootstrap_config.yaml ~/ray_bootstrap_key.pem"
    )


def _wait_for_serve(folder: str, limit_s: float) -> str:
    """Prints its two addresses; ends with 3 if it ended, with 4 if it takes too long."""
    return (
        f"cd {folder}; for turn in $(seq {int(limit_s * 2)}); do "
        "test $(wc -l <serve.out) -ge 2 && cat serve.out && exit 0; "
        "kill -0 $(cat serve.pid) 2>/dev/null || exit 3; sleep 0.5; done; exit 4"
    )


def _as_toml(settings: dict[str, object]) -> str:
    """Plain values at the top level; JSON's texts, numbers and lists of them are TOML's too."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)
