"""Ranks on two machines that do not know, or wrongly know, what they are called."""

import json
import subprocess
import sys

import pytest

from tests.nodes.rig import Network

pytestmark = [pytest.mark.slow]

PORT = 29500
RANK = """
import json, sys
from worker.link_probe import measure_link
host, port, rank = json.loads(sys.argv[1])
figures = measure_link(host, port, rank=rank, listener=None, timeout_s=60.0)
print(json.dumps([figures.latency_s, figures.bytes_per_s]))
"""


@pytest.mark.parametrize("address", ["127.0.1.1", ""])
def test_case_108_ranks_meet_whatever_their_hosts_names_resolve_to(address: str) -> None:
    with Network(2) as network:
        for machine in network.machines:
            known = f"{address} {machine.name}\n" if address else ""
            (machine.files / "etc/hosts").write_text(f"127.0.0.1 localhost\n{known}")
        first = network.machines[0].address
        ranks = [
            machine.start(
                [sys.executable, "-c", RANK, json.dumps([first, PORT, rank])],
                stderr=subprocess.STDOUT,
            )
            for rank, machine in enumerate(network.machines)
        ]
        said = [rank.communicate(timeout=90.0)[0] for rank in ranks]

    for text in said:
        latency_s, bytes_per_s = json.loads(text.splitlines()[-1])
        assert 0 < latency_s < 1
        assert bytes_per_s > 1e5
