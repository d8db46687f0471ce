"""`stoker up` on two machines that have no Stoker: pip installs it there, from a folder of wheels.

The machines reach no package index, so STOKER_WHEELS must name such a folder:
`pip download --dest FOLDER --constraint requirements.lock . pip "setuptools>=77" wheel`.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.ray_nodes import ASK
from tests.nodes.rig import HOME, ROOT, Network
from tests.nodes.ssh import start_sshd
from tests.nodes.test_up import FILE, ours

WHEELS = os.environ.get("STOKER_WHEELS", "")
START_S = 900.0
UP_S = 2 * START_S + 120.0
VENV = "~/.stoker/venv/bin"

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(not WHEELS, reason="STOKER_WHEELS names no folder of wheels"),
]


@pytest.fixture
def network() -> Iterator[Network]:
    """A head and a worker with Python alone, and a laptop whose key opens both."""
    with Network(3) as network:
        head, worker, laptop = network.machines
        start_sshd([head, worker], laptop)
        for machine in (head, worker):
            (machine.home / ".bashrc").write_text("")
            (machine.home / ".config/pip").mkdir(parents=True)
            (machine.home / ".config/pip/pip.conf").write_text(
                f"[global]\nno-index = true\nfind-links = {Path(WHEELS).resolve()}\n"
            )
        yield network


@pytest.mark.timeout(2 * UP_S)
def test_machines_without_stoker_have_it_after_one_command_and_serve(network: Network) -> None:
    head, worker, laptop = network.machines
    text = FILE.format(
        head=head.address,
        worker=worker.address,
        bin=VENV,
        models=ROOT / "models",
        start_timeout_s=START_S,
    )
    text = text.replace("num_cpus = 1", f'num_cpus = 1\nsource = "{ROOT}"')
    (laptop.home / "cluster.toml").write_text(text)

    up = laptop.run(["stoker", "up", "cluster.toml"], timeout_s=UP_S).stdout

    front = next(line for line in up.splitlines() if line.startswith("tcp://"))
    asked = json.dumps([front, f"{HOME}/.stoker/trial/key", ["The capital of France is"]])
    assert laptop.run([sys.executable, "-c", ASK, asked]).returncode == 0
    for machine in (head, worker):
        ranks = [line for line in ours(machine) if "RankActor" in line]
        where = "import worker.models, sys; print(sys.prefix, worker.models.__file__)"
        found = machine.run(["bash", "-c", f"{VENV}/python -c '{where}'"]).stdout.split()
        assert ranks, machine.name
        assert all(path.startswith(f"{HOME}/.stoker/venv") for path in found), found

    down = laptop.run(["stoker", "down", "cluster.toml"], timeout_s=300.0).stdout

    assert "nothing is left on any node" in down
    for machine in (head, worker):
        assert not ours(machine)
        left = {path.name for path in (machine.home / ".stoker").iterdir()}
        assert left == {"source", "venv"}, "what was installed stays, and nothing else"
