"""How layers are dealt to pipeline stages."""

import itertools
import json
from pathlib import Path

import pytest

from worker.models.spec import model_stages, read_spec
from worker.shards import Span
from worker.stages import ImpossibleStages, deal_stages


def sizes(num_layers: int, size: int, head_layers: float = 0.0) -> list[int]:
    return [stage.layers.size for stage in deal_stages(num_layers, size, head_layers)]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 30, 80])
@pytest.mark.parametrize("head_layers", [0.0, 0.4, 4.1, 50.0])
def test_every_layer_is_in_one_stage_and_every_stage_has_one(
    num_layers: int, head_layers: float
) -> None:
    for size in range(1, num_layers + 1):
        stages = deal_stages(num_layers, size, head_layers)

        assert [stage.index for stage in stages] == list(range(size))
        assert stages[0].layers.start == 0
        assert stages[-1].layers.stop == num_layers
        assert all(a.layers.stop == b.layers.start for a, b in itertools.pairwise(stages))
        assert min(stage.layers.size for stage in stages) >= 1


def test_the_last_stage_has_fewer_layers_for_the_output_layer() -> None:
    assert sizes(30, 2) == [15, 15]
    assert sizes(30, 2, 4.0) == [17, 13]
    assert sizes(30, 3, 4.0) == [12, 11, 7]
    assert sizes(3, 2) == [2, 1]
    assert sizes(4, 3, 9.0) == [2, 1, 1]


def test_only_the_ends_embed_and_answer() -> None:
    first, middle, last = deal_stages(9, 3)

    assert (first.is_first, first.is_last) == (True, False)
    assert (middle.is_first, middle.is_last) == (False, False)
    assert (last.is_first, last.is_last) == (False, True)
    (whole,) = deal_stages(9, 1)
    assert whole.is_first
    assert whole.is_last
    assert whole.layers == Span(0, 9)


def test_more_stages_than_layers_are_refused_with_the_limit() -> None:
    with pytest.raises(ImpossibleStages, match=r"pipeline_parallel_size=4 .* at most 3"):
        deal_stages(3, 4)


def test_smollm2_is_dealt_by_what_a_step_costs(tmp_path: Path) -> None:
    """Its output layer is as large as eight of its layers, and counts half."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    stages = model_stages(read_spec(tmp_path), 2)

    assert [stage.layers.size for stage in stages] == [17, 13]
