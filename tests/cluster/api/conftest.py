"""API servers over scripted engines."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.api.rig import ApiRig, script_of
from tests.cluster.frontend.fake_engine import ANSWER, say_nothing
from tests.cluster.frontend.tiny_tokenizers import make_tokenizer

StartRig = Callable[..., ApiRig]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiRig]:
    """Answers every request with `ANSWER`, as far as its limit allows."""
    script = script_of(make_tokenizer("llama3_like"), ANSWER, num_cached=2)
    with ApiRig(tmp_path_factory.mktemp("rig"), script=script) as rig:
        yield rig


@pytest.fixture
def start_rig(tmp_path: Path) -> Iterator[StartRig]:
    """Starts API servers as a test wants them; their engines say nothing by themselves."""
    rigs: list[ApiRig] = []

    def start(**fields: object) -> ApiRig:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        rigs.append(ApiRig(folder, **{"script": say_nothing, **fields}))  # type: ignore[arg-type]
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.close()
