"""End tokens and sampling defaults out of a model's own files."""

import json
from pathlib import Path

import pytest

from cluster.generation import GenerationFileDamaged, read_generation
from cluster.messages.clients import GenerationDefaults


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


def test_a_model_without_the_files_has_neither(tmp_path: Path) -> None:
    assert read_generation(tmp_path) == ((), GenerationDefaults())


def test_end_tokens_of_both_files_count_once_each(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", {"eos_token_id": [128001, 128009]})
    write(tmp_path, "config.json", {"eos_token_id": 128009})
    assert read_generation(tmp_path)[0] == (128001, 128009)

    write(tmp_path, "config.json", {"eos_token_id": [7, 128001], "hidden_size": 3})
    assert read_generation(tmp_path)[0] == (128001, 128009, 7)


def test_defaults_are_what_the_file_says_and_no_more(tmp_path: Path) -> None:
    write(
        tmp_path,
        "generation_config.json",
        {"temperature": 0.6, "top_k": 20, "do_sample": True, "max_new_tokens": 99},
    )
    assert read_generation(tmp_path)[1] == GenerationDefaults(
        temperature=0.6, top_k=20, max_tokens=99
    )


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "two"}', '{"top_p": []}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(GenerationFileDamaged, match=r"generation_config\.json: "):
        read_generation(tmp_path)
