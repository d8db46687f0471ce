"""Choosing a set of operations loads that set and no other."""

import subprocess
import sys

import pytest

from worker.ops.choice import find_draw, make_operations

LIST_LOADED = """
import sys
import worker.runner
from worker.ops.choice import make_operations
make_operations({name!r}, "cpu")
print(*(name for name in sys.modules if name.startswith(("triton", "worker.ops."))))
"""


@pytest.mark.parametrize("name", ["cpu", "reference", "auto"])
def test_triton_is_loaded_for_the_cuda_set_alone(name: str) -> None:
    code = LIST_LOADED.format(name=name)
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    loaded = told.split()
    assert "worker.ops.reference" in loaded or "worker.ops.cpu" in loaded
    assert not [module for module in loaded if module.split(".")[0] == "triton"]
    assert not [module for module in loaded if "triton" in module or "cuda" in module]


def test_only_the_cuda_set_has_a_kernel_that_draws() -> None:
    assert find_draw(make_operations("reference", "cpu")) is None
    assert find_draw(make_operations("auto", "cpu")) is None
