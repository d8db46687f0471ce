"""One server for all tests of a module, whose model repeats what it is told."""

from collections.abc import Iterator

import openai
import pytest

from tests.cluster.api.openai.tools.parrot import parrot
from tests.cluster.api.rig import ApiRig


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiRig, openai.OpenAI]]:
    with parrot(tmp_path_factory.mktemp("parrot")) as both:
        yield both


@pytest.fixture(scope="module")
def parrot_rig(talk: tuple[ApiRig, openai.OpenAI]) -> ApiRig:
    return talk[0]


@pytest.fixture(scope="module")
def sdk(talk: tuple[ApiRig, openai.OpenAI]) -> openai.OpenAI:
    return talk[1]
