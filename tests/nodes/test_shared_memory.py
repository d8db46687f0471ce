"""Ranks of one host where /dev/shm is as small as in a container."""

from collections.abc import Iterator

import pytest

from tests.nodes.ray_nodes import MODELS
from tests.nodes.rig import Machine, Network

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Network(1) as network:
        (machine,) = network.machines
        machine.run(["mount", "-o", "remount,size=1m", "/dev/shm"])
        yield machine


def generate(machine: Machine, *options: str) -> str:
    command = ["stoker", "generate", "smollm2", f"--models-dir={MODELS}", "--prompt=Once upon"]
    command += ["--max-tokens=4", "--temperature=0", "--max-model-len=256", "--num-kv-blocks=32"]
    return machine.run([*command, "--no-stats", *options], timeout_s=150.0).stdout


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_case_110_ranks_of_one_host_need_no_dev_shm_and_a_small_one_is_said(
    machine: Machine, backend: str
) -> None:
    alone = generate(machine, "--backend=local")
    said = generate(machine, f"--backend={backend}", "--tensor-parallel-size=2")

    assert said.splitlines()[-1] == alone.splitlines()[-1]
    assert "SIGBUS" not in said


def test_case_110_ranks_on_gpus_need_a_larger_one_and_the_flag_is_named(machine: Machine) -> None:
    command = ["stoker", "doctor", f"--models-dir={MODELS}", "--device=cuda"]
    done = machine.run([*command, "--tensor-parallel-size=2"], check=False)

    (line,) = [line for line in done.stdout.splitlines() if " shared memory " in line]
    assert line.startswith("FAIL")
    assert "free of 1 MiB" in line
    assert "--shm-size=1g" in line
