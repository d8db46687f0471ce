"""`stoker serve` as a test starts it: real processes, real sockets, and its log."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import openai
import psutil

from cluster.worker_main import NAME

WAIT_S = 120.0
"""For a start or an end, on a machine that does other things too."""

REAL = (sys.executable, "-m", "stoker.cli", "serve")

KEY = "key-of-the-tests"
HEADERS = {"Authorization": f"Bearer {KEY}"}

SMALL = (
    "--backend=local",
    "--max-model-len=2048",
    "--max-num-seqs=32",
    "--max-num-batched-tokens=256",
    "--num-kv-blocks=512",
)
"""Enough for tests, and quick to start."""


class Serving:
    """One `stoker serve` process and its family. Use as a context manager, which ends it."""

    def __init__(
        self,
        model: Path,
        *options: str,
        keys: str = KEY,
        environ: dict[str, str] | None = None,
        command: Sequence[str] = REAL,
    ) -> None:
        """Start it at any free port.

        Args:
            options: those of `SMALL` hold too; what is said last wins.
            keys: as in the environment, separated by commas; empty: none.
        """
        self.process = subprocess.Popen(
            [*command, str(model), *SMALL, "--port=0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            env={**os.environ, "STOKER_API_KEY": keys, **(environ or {})},
        )
        self.model = str(model)
        self.api_key = keys.partition(",")[0]
        self.log: list[str] = []
        self._seen = threading.Condition()
        self._has_ended = False
        self._family: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        self._address = self._base_url = ""

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.remember_family()
            with self._seen:
                self.log.append(line.decode(errors="replace").rstrip())
                self._seen.notify_all()
        with self._seen:
            self._has_ended = True
            self._seen.notify_all()

    # --- what it says ---

    @property
    def text(self) -> str:
        return "\n".join(self.log)

    def wait_for(self, event: str, timeout_s: float = WAIT_S) -> str:
        """The first line of the log with this in it."""
        with self._seen:
            assert self._seen.wait_for(
                lambda: any(event in line for line in self.log), timeout=timeout_s
            ), f"no {event!r} in its log:\n{self.text}"
            return next(line for line in self.log if event in line)

    def wait_up(self) -> "Serving":
        """Wait until it has said both addresses, which is when a token can be made."""
        with self._seen:
            self._seen.wait_for(lambda: self._has_ended or self._is_up, timeout=WAIT_S)
        assert self._is_up, f"it did not come up:\n{self._family}\n{self.text}"
        assert self.process.stdout is not None
        self._address = self.process.stdout.readline().decode().strip()
        self._base_url = self.process.stdout.readline().decode().strip()
        assert self._base_url.startswith("http://"), self._base_url
        self.remember_family()
        return self

    @property
    def _is_up(self) -> bool:
        return any("stoker: serving" in line for line in self.log)

    @property
    def address(self) -> str:
        """Of the engine's front socket, for `Client`."""
        assert self._address, "wait_up first"
        return self._address

    @property
    def base_url(self) -> str:
        """Of HTTP, without a slash at its end; also before it is up."""
        if not self._base_url:
            line = self.wait_for("http_bound")
            self._base_url = line.partition("url=")[2].split()[0]
        return self._base_url

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.base_url.removeprefix("http://").rpartition(":")
        return host.strip("[]"), int(port)

    # --- calling it ---

    def http(self, timeout_s: float = WAIT_S) -> httpx.Client:
        """A client that bears the key; close it."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout_s)

    def sdk(self, **settings: object) -> openai.OpenAI:
        """The official client, which retries nothing unless told to; close it."""
        given = {"max_retries": 0, "timeout": WAIT_S, **settings}
        return openai.OpenAI(
            base_url=f"{self.base_url}/v1",
            api_key=self.api_key or "none",
            **given,  # type: ignore[arg-type]
        )

    # --- its processes ---

    def remember_family(self) -> None:
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._family[child.pid] = child
        except psutil.NoSuchProcess:
            return

    def _running(self, module: str) -> list[psutil.Process]:
        self.remember_family()
        return [child for child in self._family.values() if module in _command(child)]

    @property
    def family(self) -> list[psutil.Process]:
        """All its descendants that run."""
        self.remember_family()
        return [child for child in self._family.values() if _command(child)]

    @property
    def pid(self) -> int:
        """Of the supervisor, which is `stoker serve` itself."""
        return self.process.pid

    @property
    def engine(self) -> psutil.Process:
        (engine,) = self._running("cluster.engine_main")
        return engine

    @property
    def workers(self) -> list[psutil.Process]:
        return [child for child in self.family if _name(child) == NAME]

    @property
    def api_servers(self) -> list[psutil.Process]:
        return self._running("cluster.api.server_main")

    # --- its end ---

    def ask_to_end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Its exit code, once it and all its family are gone."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        deadline = time.monotonic() + 10.0
        for child in self._family.values():
            assert _is_over(child, deadline), f"{child} is left\n{self.text}"
        return code

    def kill(self) -> None:
        """Whatever is left of it."""
        self.remember_family()
        for process in (self.process, *self._family.values()):
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for child in self._family.values():
                _resume(child)
            for patience_s in (3.0, 20.0):  # asked twice, it waits for nobody
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience_s)
                    break
        self.kill()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _resume(process: psutil.Process) -> None:
    try:
        process.resume()
    except psutil.NoSuchProcess:
        return


def _is_over(process: psutil.Process, deadline: float) -> bool:
    """Whether a process that is not our child ends in time; an unreaped one has ended."""
    while time.monotonic() < deadline:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            process.wait(0.05)
            return True
        except psutil.TimeoutExpired:
            continue
        except psutil.NoSuchProcess:
            return True
    return False
