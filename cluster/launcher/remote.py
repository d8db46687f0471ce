"""Commands on another machine, over ssh, each with a limit in time."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import RemoteError

CONNECT_S = 10
"""For a machine to take a connection."""

SHOWN_LETTERS = 80
"""Of a command in an error."""

OPTIONS = (
    "BatchMode=yes",  # never ask anybody
    f"ConnectTimeout={CONNECT_S}",
    "StrictHostKeyChecking=accept-new",
    "ServerAliveInterval=5",
    "LogLevel=ERROR",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """One machine."""

    host: str
    user: str
    key: Path

    def run(self, command: str, *, timeout_s: float, stdin: bytes = b"") -> str:
        """Run a line of a shell; what it printed on its standard output.

        Raises:
            RemoteError: the machine cannot be reached, or the command fails or takes too long.
        """
        shown = command if len(command) <= SHOWN_LETTERS else f"...{command[-SHOWN_LETTERS:]}"
        options = [word for option in OPTIONS for word in ("-o", option)]
        line = ["ssh", *options, "-i", str(self.key.expanduser()), f"{self.user}@{self.host}"]
        try:
            done = subprocess.run(
                [*line, command], input=stdin, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RemoteError(f"{self.host}: no end of `{shown}` in {timeout_s:g} s") from error
        except FileNotFoundError as error:
            raise RemoteError(
                "there is no `ssh` on this machine; install OpenSSH's client"
            ) from error
        said = (done.stderr + done.stdout).decode(errors="replace").strip()
        if done.returncode == 255:
            raise RemoteError(f"{self.host} cannot be reached as {self.user} by ssh: {said}")
        if done.returncode != 0:
            raise RemoteError(f"{self.host}: `{shown}` ended with {done.returncode}: {said}")
        return done.stdout.decode(errors="replace")

    def write(self, path: str, data: bytes) -> None:
        """Write a file for its owner alone; `path` is a shell's, so ~ is the home there."""
        self.run(f"umask 077 && cat > {path}.new && mv {path}.new {path}", timeout_s=30, stdin=data)
