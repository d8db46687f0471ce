"""Secure shells on machines of the rig: a daemon in each, and a key that opens them."""

import subprocess
from collections.abc import Sequence

from tests.nodes.rig import BIN, HOME, Machine

SSHD_CONFIG = f"""
Port 22
HostKey {HOME}/host_key
AuthorizedKeysFile {HOME}/.ssh/authorized_keys
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PidFile none
Subsystem sftp internal-sftp
"""


def start_sshd(machines: Sequence[Machine], client: Machine) -> None:
    """Let `client` log in on `machines`, which can log in on each other; ends with them."""
    _make_key(client, ".ssh/id_ed25519")
    public = (client.home / ".ssh/id_ed25519.pub").read_text()
    for machine in machines:
        _make_key(machine, "host_key")
        folder = machine.home / ".ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "authorized_keys").write_text(public)
        (machine.home / "sshd.conf").write_text(SSHD_CONFIG)
        (machine.home / ".bashrc").write_text(f'export PATH="{BIN}:$PATH"\n')
        (machine.files / "run/sshd").mkdir(exist_ok=True)
        machine.start(
            ["/usr/sbin/sshd", "-D", "-e", "-f", f"{HOME}/sshd.conf"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _make_key(machine: Machine, path: str) -> None:
    machine.run(["mkdir", "-p", "-m", "700", f"{HOME}/.ssh"])
    machine.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{HOME}/{path}"])
