"""Choosing a set of operations loads that set and no other."""

import subprocess
import sys
from functools import partial

from worker.ops.choice import find_draw, make_operations
from worker.ops.native.sampling import draw as native_draw

LIST_LOADED = """
import sys
import worker.runner
from worker.ops.choice import make_operations
for name in ("cpu", "reference", "auto"):
    make_operations(name, "cpu")
print(*(name for name in sys.modules if name.startswith(("triton", "worker.ops."))))
"""


def test_triton_is_loaded_for_the_cuda_set_alone() -> None:
    command = [sys.executable, "-c", LIST_LOADED]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    loaded = told.split()
    assert {"worker.ops.reference", "worker.ops.cpu"} <= set(loaded)
    assert not [module for module in loaded if module.split(".")[0] == "triton"]
    assert not [module for module in loaded if "triton" in module or "cuda" in module]


def test_the_fast_set_of_cpus_draws_natively_and_the_oracle_in_torch() -> None:
    assert find_draw(make_operations("reference", "cpu")) is None
    draw = find_draw(make_operations("auto", "cpu"))
    assert isinstance(draw, partial)
    assert draw.func is native_draw
