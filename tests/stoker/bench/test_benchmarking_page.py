"""What docs/benchmarking.md says of options and figures is all there is."""

import argparse
import re

import msgspec
import pytest

from stoker.bench.arguments import (
    add_latency_arguments,
    add_serve_arguments,
    add_throughput_arguments,
)
from stoker.bench.figures import Figures
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "benchmarking.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "add", [add_serve_arguments, add_throughput_arguments, add_latency_arguments]
)
def test_every_option_is_explained(add: object) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)  # type: ignore[operator]
    # Of a switch one form is enough.
    for action in parser._actions:
        named = [option for option in action.option_strings if re.search(rf"{option}\b", PAGE)]
        assert named, f"{action.option_strings} are not in docs/benchmarking.md"


def test_every_figure_is_defined() -> None:
    for field in msgspec.structs.fields(Figures):
        assert re.search(rf"`{field.name}`", PAGE), f"{field.name} is not defined"
