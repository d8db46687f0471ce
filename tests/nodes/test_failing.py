"""What cannot be served from two nodes ends in time and names the culprit; a lost one is borne."""

import secrets
from collections.abc import Iterator
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from tests.nodes.ray_nodes import MODELS, RAY_ENV, answers, served, start_ray
from tests.nodes.rig import HOME, Machine, Network

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SHORT_S = 60.0
"""Far below every limit that a start has by default."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two machines with a CPU of one Ray each."""
    with Network(2) as network:
        start_ray(network.machines, num_cpus=1, env=RAY_ENV)
        yield network


def refusal(machine: Machine, *options: str, model: str = "smollm2", **env: str) -> str:
    """What `stoker serve` says, which must not come up and must not take long."""
    command = ["stoker", "serve", model, f"--models-dir={MODELS}", "--address=auto", "--no-http"]
    command += ["--log-level=error", "--max-model-len=512"]
    done = machine.run(
        [*command, *options],
        env={**RAY_ENV, **env},
        timeout_s=SHORT_S,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    return done.stdout


@pytest.mark.model
def test_case_105_more_ranks_than_cpus_are_refused_with_asked_free_and_each_node(
    network: Network,
) -> None:
    head, worker = network.machines

    said = refusal(head, "--tensor-parallel-size=3", "--room-timeout-s=1")

    assert "asked for 3 CPU (3 ranks), there are 2 of 2 CPU free" in said
    for machine in (head, worker):
        line = next(line for line in said.splitlines() if line.startswith(f"  {machine.address} "))
        assert line.endswith("1 of 1 CPU free")


@pytest.mark.model
def test_a_wrong_token_is_named_long_before_ray_gives_up(network: Network) -> None:
    head = network.machines[0]
    (head.home / "other_token").write_text(secrets.token_hex(32))

    said = refusal(head, RAY_AUTH_TOKEN_PATH=f"{HOME}/other_token")

    assert "refuses this host's token" in said
    assert "RAY_AUTH_TOKEN_PATH" in said


@pytest.mark.model
def test_a_node_without_the_model_is_named(network: Network) -> None:
    head, worker = network.machines
    (head.home / "mine").mkdir()
    head.run(["mount", "--bind", str(MODELS / "smollm2-135m-instruct"), f"{HOME}/mine"])

    said = refusal(head, "--tensor-parallel-size=2", model=f"{HOME}/mine")

    assert f"node {worker.address} ({worker.name}): there is no folder {HOME}/mine" in said
    assert "Copy it to the same path" in said


@pytest.mark.model
def test_case_107_a_variable_of_the_first_host_reaches_the_other_nodes(network: Network) -> None:
    head, worker = network.machines

    options = ["--tensor-parallel-size=2", "--worker-env=STOKER_NODE_ADDRESS"]

    said = refusal(head, *options, STOKER_NODE_ADDRESS=head.address)

    what = f"STOKER_NODE_ADDRESS={head.address} is no address of this host"
    assert f"node {worker.address} ({worker.name}): {what}" in said
    assert f"eth0 {worker.address}" in said


@pytest.mark.model
def test_case_115_a_node_with_another_torch_is_refused_by_name_before_weights_load(
    network: Network,
) -> None:
    head, worker = network.machines
    described = str(distribution("torch").locate_file(f"torch-{version('torch')}.dist-info"))
    text = Path(described, "METADATA").read_text(encoding="utf-8")
    other = text.replace(f"\nVersion: {version('torch')}\n", "\nVersion: 2.0.0\n")
    (worker.home / "METADATA").write_text(other)
    worker.run(["mount", "--bind", f"{HOME}/METADATA", f"{described}/METADATA"])
    try:
        said = refusal(head, "--tensor-parallel-size=2", "--log-level=info")
    finally:
        worker.run(["umount", f"{described}/METADATA"])

    refused = next(line for line in said.splitlines() if line.startswith("stoker: error"))
    assert f"node {worker.address} ({worker.name}) has torch 2.0.0, but" in refused
    assert f"has {version('torch')}" in refused
    assert "worker_loaded" not in said


@pytest.mark.model
def test_a_node_that_is_cut_off_costs_its_group_and_nothing_else(network: Network) -> None:
    head, worker = network.machines
    with served(head, "--address=auto", "--groups=2", env=RAY_ENV) as cluster:
        before = answers(head, head, cluster, ["Once upon a time"] * 4)
        network.cut(worker)
        try:
            during = answers(head, head, cluster, ["Once upon a time"] * 4)
        finally:
            network.heal(worker)

    assert during == before
