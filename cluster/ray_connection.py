"""The Ray that ranks run on: one of our own, on this host alone, or one that others share."""

import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from cluster.errors import BackendError

OBJECT_STORE_BYTES = 80 << 20
"""Ray's least is 75 MiB. Nothing of ours goes through its object store."""

KNOCK_S = 5.0
"""For a Ray elsewhere to take a connection."""

CONNECT_SUSPICION_S = 3.0
"""A Ray that answers does so in less; one that has not is asked whether it refuses the token."""

TOKEN_CHECK_S = 10.0

_OWN_CLUSTER = {
    # Despite its name: the node address becomes 127.0.0.1 and every socket stays on loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    # Ray would kill workers by its own idea of memory; we size the pools ourselves.
    "RAY_memory_monitor_refresh_ms": "0",
}
_EVERY_CLUSTER = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    # Ray's autoscaler would print its news among our own output.
    "RAY_SCHEDULER_EVENTS": "0",
    # Else Ray prints a stack trace when the supervisor is asked to end.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
}


class RayConnection:
    """This process as a driver of the Ray at `address`; empty: of one that it starts itself."""

    def __init__(self, address: str, num_cpus: int) -> None:
        """`num_cpus`: of a Ray of our own; 0: as many as this host has."""
        self.address = address
        self._num_cpus = num_cpus
        self.folder: Path | None = None
        """Files of a Ray of our own."""
        self._is_open = False

    def open(self, timeout_s: float) -> str:
        """Connect or start; the address under which that Ray knows this host.

        Raises:
            BackendError: nobody answers, or not to us; or it did not start.
        """
        own = {} if self.address else _OWN_CLUSTER
        for name, value in {**_EVERY_CLUSTER, **own}.items():
            os.environ[name] = value
        if self.address:
            self._connect(timeout_s)
        else:
            self._start_own()
        import ray

        self._is_open = True
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Leave it; end it if it is ours."""
        if self._is_open or not self.address:
            import ray

            ray.shutdown()
        self._is_open = False
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _connect(self, timeout_s: float) -> None:
        """In a thread: Ray itself tries for 20 s before it says that it was refused."""
        problems: list[Exception] = []

        def connect() -> None:
            import ray

            try:
                ray.init(self.address, log_to_driver=True, logging_level=logging.ERROR)
            except Exception as error:
                problems.append(error)

        try:
            _knock(self.address)
        except OSError as error:
            raise BackendError(self._no_ray(error)) from error
        thread = threading.Thread(target=connect, name="ray-connect", daemon=True)
        thread.start()
        thread.join(min(CONNECT_SUSPICION_S, timeout_s))
        if thread.is_alive() and _is_refused(self.address):
            raise BackendError(
                f"the Ray at {self.address} refuses this host's token. Give the one that the "
                "cluster was started with: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, or "
                "~/.ray/auth_token"
            )
        thread.join(timeout_s)
        if thread.is_alive():
            raise BackendError(f"the Ray at {self.address} did not answer within {timeout_s:g} s")
        if problems:
            raise BackendError(self._no_ray(problems[0])) from problems[0]

    def _no_ray(self, error: Exception) -> str:
        return (
            f"no Ray cluster answers at {self.address}: {str(error).rstrip('.')}. Start one with "
            "`ray start --head`, or leave the address away to have one made here"
        )

    def _start_own(self) -> None:
        # Ray opens its own folder to everybody, so it gets one inside a private one. The names
        # are short because the paths of Ray's sockets must stay below 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="stoker-ray-"))
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        import ray

        try:
            ray.init(
                "local",
                num_cpus=self._num_cpus or None,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=True,
                logging_level=logging.ERROR,
                _temp_dir=str(self.folder / "r"),
            )
        except Exception as error:
            raise BackendError(f"Ray did not start on this host: {error}") from error


def _knock(address: str) -> None:
    """Ray tries a dead address for minutes; a connection of our own says it at once."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()


def _is_refused(address: str) -> bool:
    """Whether the Ray there takes us for a stranger, as a process of its own is told at once."""
    program = f"import ray; ray.init({address!r}, logging_level='ERROR')"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    end = threading.Timer(TOKEN_CHECK_S, process.kill)
    end.start()
    try:
        return any("InvalidAuthToken" in line for line in process.stderr)
    finally:
        end.cancel()
        process.kill()
        process.wait()
        process.stderr.close()
