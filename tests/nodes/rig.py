"""Machines for tests: namespaces of this one, with addresses of their own on one bridge.

Each machine has its own network, processes, host name, /tmp (with Ray's files and a home) and
/dev/shm; files elsewhere are the machine's own that the tests run on. Nothing has a name that
another run could take, and everything hangs on processes of ours: when the tests end, however
they end, the kernel removes all of it. Traffic never leaves the bridge. Needs root.
"""

import contextlib
import functools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent
HOME = "/tmp/home"
SUBNET = "10.77.0"
SECOND_SUBNETS = ("10.78.0.", "fd00::")
SETUP_S = 20.0
END_S = 10.0

UNSHARE = ("unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child")

# Process 1 of a machine: makes its file systems, says so, and lives until its input ends, which
# ends every process of the machine. As process 1 it also buries those that nobody waits for.
FIRST_PROCESS = f"""
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /tmp
mount -t tmpfs -o size=8g tmpfs /dev/shm
mkdir -m 700 {HOME}
mkdir -p /tmp/etc /tmp/run
sed "s#^root:.*#root:x:0:0:root:{HOME}:/bin/bash#" /etc/passwd > /tmp/etc/passwd
printf '%s' "$HOSTS" > /tmp/etc/hosts
: > /tmp/etc/resolv.conf
for name in passwd hosts resolv.conf; do mount --bind /tmp/etc/$name /etc/$name; done
mount --bind /tmp/run /run
hostname "$NAME"
echo ready
while read -r _; do :; done
"""


@functools.cache
def can_make_machines() -> bool:
    """Whether namespaces can be made here: root, and a kernel that lets it."""
    if os.geteuid() != 0:
        return False
    tried = subprocess.run([*UNSHARE, "ip", "link", "add", "br0", "type", "bridge"], check=False)
    return tried.returncode == 0


class Machine:
    """One host of a `Network`. Commands run in it as they would on a machine of their own."""

    def __init__(self, name: str, address: str, hosts: str) -> None:
        self.name, self.address = name, address
        environment = {"PATH": os.environ["PATH"], "NAME": name, "HOSTS": hosts}
        self._unshare = subprocess.Popen(
            [*UNSHARE, "bash", "-c", FIRST_PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self._unshare.stdout is not None
        self._started: list[subprocess.Popen[str]] = []
        if self._unshare.stdout.readline() != b"ready\n":
            self.end()
            raise RuntimeError(f"the machine {name} could not be made; see standard error")
        (self._first,) = psutil.Process(self._unshare.pid).children()

    @property
    def pid(self) -> int:
        """Of its first process, as seen from outside; names its namespaces."""
        return int(self._first.pid)

    @property
    def files(self) -> Path:
        """Its file system's root, as seen from outside."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def home(self) -> Path:
        """Its home folder, as seen from outside."""
        return self.files / HOME.lstrip("/")

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = None,
    ) -> "subprocess.Popen[str]":
        """A process of the machine, in its home, with a bare environment and `env`.

        It gets its own session; `interrupt` reaches it.
        """
        line = f"cd {HOME} && exec {shlex.join(command)}"
        inside = ["nsenter", f"--target={self.pid}", "--net", "--pid", "--mount", "--uts", "--ipc"]
        process = subprocess.Popen(
            [*inside, "bash", "-c", line],
            env={**bare_environment(), **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> "subprocess.CompletedProcess[str]":
        """Run to the end; what was printed on both channels is together in `stdout`."""
        process = self.start(command, env=env, stderr=subprocess.STDOUT)
        try:
            printed, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            interrupt(process, signal.SIGKILL)
            printed, _ = process.communicate()
            raise AssertionError(
                f"on {self.name}: {shlex.join(command)} took over {timeout_s} s:\n{printed}"
            ) from error
        done = subprocess.CompletedProcess(command, process.returncode, printed)
        assert not check or done.returncode == 0, (
            f"on {self.name}: {shlex.join(command)} ended with {done.returncode}:\n{printed}"
        )
        return done

    def commands(self) -> list[str]:
        """Command lines of what runs in it, besides its first process."""
        space = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        lines = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                is_inside = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == space
                if is_inside and process.pid != self.pid:
                    lines.append(" ".join(process.cmdline()))
        return [line for line in lines if line]  # those that have ended have none

    def end(self) -> None:
        """End the machine, and with it all that runs in it."""
        assert self._unshare.stdin is not None
        self._unshare.stdin.close()
        try:
            self._unshare.wait(END_S)
        except subprocess.TimeoutExpired:
            self._unshare.kill()
            self._unshare.wait()
        for process in (self._unshare, *self._started):
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class Network:
    """Machines `n1` to `nN` at SUBNET.1 to SUBNET.N, all reaching each other and nobody else.

    Each calls itself by a name that it resolves to 127.0.1.1, as Debian does.
    """

    def __init__(self, num_machines: int) -> None:
        self._parts = ExitStack()
        try:
            self._bridge = self._machine("bridge", "", "")
            self._add_bridge("br0")
            self.machines = [self._connected(number) for number in range(1, num_machines + 1)]
        except BaseException:
            self._parts.close()
            raise

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def cut(self, machine: Machine) -> None:
        """Pull the machine's cable, without a word to either end's programs."""
        _ip(self._bridge, f"link set {machine.name} down")

    def heal(self, machine: Machine) -> None:
        _ip(self._bridge, f"link set {machine.name} up")

    def connect_twice(self) -> None:
        """Give each machine a second interface, at N of `SECOND_SUBNETS`, on a bridge of its own.

        No default route leads there.
        """
        self._add_bridge("br1")
        for number, machine in enumerate(self.machines, 1):
            self._plug(machine, "eth1", "br1", f"{machine.name}-second")
            four, six = (f"{subnet}{number}" for subnet in SECOND_SUBNETS)
            _ip(machine, f"addr add {four}/24 dev eth1", f"addr add {six}/64 dev eth1 nodad")

    def _machine(self, name: str, address: str, hosts: str) -> Machine:
        machine = Machine(name, address, hosts)
        self._parts.callback(machine.end)
        return machine

    def _connected(self, number: int) -> Machine:
        name, address = f"n{number}", f"{SUBNET}.{number}"
        hosts = f"127.0.0.1 localhost\n127.0.1.1 {name}\n"
        machine = self._machine(name, address, hosts)
        self._plug(machine, "eth0", "br0", name)
        _ip(
            machine,
            "link set lo up",
            f"addr add {address}/24 dev eth0",
            "route add default dev eth0",
        )
        return machine

    def _add_bridge(self, name: str) -> None:
        _ip(self._bridge, f"link add {name} type bridge", f"link set {name} up")

    def _plug(self, machine: Machine, interface: str, bridge: str, port: str) -> None:
        """Connect a new interface of the machine to a bridge, whose end of it is `port`."""
        _ip(
            self._bridge,
            f"link add {port} type veth peer name {interface} netns {machine.pid}",
            f"link set {port} master {bridge}",
            f"link set {port} up",
        )
        _ip(machine, f"link set {interface} up")


def bare_environment() -> dict[str, str]:
    """What a login on a machine would have; nothing of the tests' own."""
    path = f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"HOME": HOME, "PATH": path, "LANG": "C.UTF-8", "USER": "root"}


def interrupt(process: "subprocess.Popen[str]", number: int = signal.SIGINT) -> None:
    """Send a signal to what `Machine.start` started; the process here only waits for it."""
    for child in psutil.Process(process.pid).children():
        child.send_signal(number)


def _ip(machine: Machine, *commands: str) -> None:
    for command in commands:
        subprocess.run(
            ["nsenter", f"--target={machine.pid}", "--net", "ip", *command.split()], check=True
        )
