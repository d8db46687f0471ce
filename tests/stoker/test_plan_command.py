"""`stoker plan`, where the answer can be worked out by hand, and where nothing fits."""

import json
import re
from typing import Any

import pytest

from stoker.cli import main

MIB = 2**20


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def layout_of(document: dict[str, Any], tp: int, pp: int = 1) -> dict[str, Any]:
    (found,) = (
        each
        for each in document["layouts"]
        if (each["tensor_parallel_size"], each["pipeline_parallel_size"]) == (tp, pp)
    )
    assert isinstance(found, dict)
    return found


def test_a_model_on_one_gpu_has_the_blocks_that_the_rest_of_its_memory_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = plan(capsys, "llama-3.1-8b", "--gpu", "H100", "--gpu-memory-utilization", "0.9")

    (rank,) = found["chosen"]["ranks"]
    assert rank["weight_bytes"] == pytest.approx(2 * 8.03e9, rel=0.01)
    assert rank["token_bytes"] == 2 * 32 * 8 * 128 * 2  # K and V, layers, heads, size, bytes
    left = 0.9 * 81_559 * MIB - rank["weight_bytes"] - 1024 * MIB - rank["activation_bytes"]
    assert rank["num_blocks"] == pytest.approx(left / rank["block_bytes"], rel=0.001)
    assert found["chosen"]["requests_at_once"] == min(
        rank["num_blocks"] // -(-found["request_tokens"] // 16), 256
    )


def test_a_model_too_large_for_one_gpu_is_dealt_to_few_and_none_is_left_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = plan(
        capsys, "llama-3.1-70b", "--gpu", "H100", "--gpus-per-node", "8", "--max-model-len", "8192"
    )

    assert "short of any use" in layout_of(found, 1)["problem"]
    assert layout_of(found, 3)["works"]  # of which two groups leave two GPUs idle
    assert found["chosen"]["tensor_parallel_size"] == 4
    assert found["chosen"]["num_groups"] == 2
    ranks = found["chosen"]["ranks"]
    assert sum(rank["weight_bytes"] for rank in ranks) == pytest.approx(2 * 70.6e9, rel=0.01)


def test_a_context_that_does_not_fit_is_named_with_the_one_that_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu = ("llama-3.1-8b", "--gpu", "L4", "--tensor-parallel-size", "1")
    problem = plan(capsys, *gpu, code=1)["chosen"]["problem"]
    match = re.search(r"less than a context of 131072; max_model_len=(\d+) would do", problem)
    assert match is not None

    found = plan(capsys, *gpu, "--max-model-len", match[1])

    assert found["chosen"]["works"]
    assert found["chosen"]["largest_context"] == int(match[1])


def test_ranks_that_cannot_share_the_heads_are_refused_with_the_sizes_that_can(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = plan(capsys, "smollm2-135m", "--tensor-parallel-size", "4", "--device=cpu", code=1)
    problem = document["chosen"]["problem"]
    assert problem.startswith("4 ranks cannot share 9 query and 3 KV heads; 1, 2, 3")


def test_stages_over_nodes_share_the_layers_and_the_memory_of_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ("--nodes", "2", "--gpus-per-node", "2", "--pipeline-parallel-size", "2")
    found = plan(capsys, "llama-3.1-70b", "--gpu", "H200", *sizes, "--tensor-parallel-size", "2")

    ranks = found["chosen"]["ranks"]
    assert len(ranks) == 4
    assert ranks[0]["layers"] == ranks[1]["layers"]
    assert ranks[1]["layers"][1] == ranks[2]["layers"][0]
    assert ranks[3]["layers"][1] == 80
    assert found["chosen"]["num_blocks"] == min(rank["num_blocks"] for rank in ranks)


def test_more_ranks_than_gpus_are_refused_with_both_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ("--gpus-per-node", "2", "--tensor-parallel-size", "4")
    problem = plan(capsys, "llama-3.1-8b", "--gpu", "H100", *sizes, code=1)["chosen"]["problem"]
    assert "4 ranks need as many GPUs; there are 2" in problem


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("llama-3.1-8b", "--gpu", "Z9000"), "Known are B200"),
        (("no-such-model",), "no model 'no-such-model' to plan for"),
    ],
)
def test_what_is_not_known_is_named_with_what_is(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 1
    assert says in capsys.readouterr().err


def test_the_tables_name_each_layout_with_what_fits_or_why_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "llama-3.1-8b", "--gpu", "L4", "--gpus-per-node", "2"]) == 0

    text = capsys.readouterr().out
    assert "on 2 x L4" in text
    assert "1 group of tensor_parallel_size=2, pipeline_parallel_size=1:" in text
    assert "less than a context of 131072" in text
    assert "works" in text
