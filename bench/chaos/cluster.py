"""`stoker serve` as a storm finds it, and what is left when it has ended."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from stoker import Client

START_S = 300.0
END_S = 60.0
SHARED_MEMORY = Path("/dev/shm")


class Served:
    """One cluster of processes on this host, in a folder of its own. Use it with `with`."""

    def __init__(
        self, model: Path, log: Path, options: Sequence[str], *, allows_chaos: bool = True
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stoker-chaos-")
        self.folder = Path(self._folder.name)
        self._shared_before = _shared_files()
        self._family: set[psutil.Process] = set()
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "stoker.cli", "serve", str(model)),
                *("--backend", "local", "--port", "0"),
                *("--socket-dir", str(self.folder), *options),
                *(("--allow-chaos",) if allows_chaos else ()),
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            process_group=0,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().decode().strip()
        self.http_address = self.process.stdout.readline().decode().strip()
        if not self.http_address:
            self.process.wait(END_S)
            raise RuntimeError(f"the cluster did not come up; its log is {log}")

    def remember_family(self) -> None:
        """Note every process that it has now, to look for them when it has ended."""
        self._family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def held_blocks(self, timeout_s: float = 30.0) -> int:
        """KV blocks that are held although nothing runs any more, or waits."""
        deadline = time.monotonic() + timeout_s
        with Client(self.address, label="blocks") as client:
            while True:
                status = client.status()
                held = sum(group.num_used_blocks for group in status.groups)
                if held == status.num_running == status.num_waiting == 0:
                    return 0
                if time.monotonic() >= deadline:
                    return held or status.num_running + status.num_waiting
                time.sleep(0.1)

    def end(self) -> list[str]:
        """End it in order; what it has left behind, in words."""
        self.remember_family()
        self.process.terminate()
        try:
            code = self.process.wait(END_S)
            left = [] if code == 0 else [f"it ended with code {code}"]
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            left = ["it did not end when it was asked to"]
        _, alive = psutil.wait_procs(self._family, timeout=10.0)
        for process in alive:
            left.append(f"process {process.pid} {process.name()}")
            process.kill()
        left += [f"{SHARED_MEMORY / name}" for name in _shared_files() - self._shared_before]
        left += [str(path) for path in self.folder.rglob("*") if path != self.folder]
        return left

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        self._folder.cleanup()


def _shared_files() -> set[str]:
    return {name for name in os.listdir(SHARED_MEMORY) if "stoker" in name}
