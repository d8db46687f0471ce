"""What the light parts of the front door load."""

import subprocess
import sys

import pytest

import stoker

HEAVY = ("torch", "ray", "transformers", "worker", "gguf", "safetensors")


def modules_after(code: str) -> set[str]:
    report = f"import sys\n{code}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "from stoker import Client, AsyncClient, SamplingParams",
        "from stoker import LLM",
        "import stoker.cli",
    ],
)
def test_the_front_door_loads_nothing_heavy(code: str) -> None:
    assert not modules_after(code) & set(HEAVY)


def test_every_public_name_is_there_and_no_other() -> None:
    for name in stoker.__all__:
        assert getattr(stoker, name).__name__ == name
    assert sorted(stoker.__all__) == dir(stoker)
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        _ = stoker.Clinet  # type: ignore[attr-defined]
