"""Tokenizers for the tests of this folder: the real one, and a small one of each family."""

from pathlib import Path

import pytest

from cluster.frontend.tokenizer import Tokenizer
from tests.cluster.frontend.tiny_tokenizers import FAMILIES, make_tokenizer


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_directory(smollm2)


@pytest.fixture(
    scope="session", params=[*FAMILIES, pytest.param("smollm2", marks=pytest.mark.model)]
)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each test that takes this runs once per family."""
    if request.param == "smollm2":
        real: Tokenizer = request.getfixturevalue("smollm2_tokenizer")
        return real
    return make_tokenizer(request.param)
