import json
from pathlib import Path

import msgspec
import pytest

from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_files import (
    TokenizerDamaged,
    TokenizerFiles,
    TokenizerNotFound,
    files_of,
)
from tests.cluster.frontend.tiny_tokenizers import CHATML, llama3_like


def write(folder: Path, **names: str | bytes | dict[str, object]) -> Path:
    """Write a model directory; tokenizer.json is there unless given otherwise."""
    contents = {"tokenizer__json": llama3_like().tokenizer_json} | names
    for name, content in contents.items():
        if isinstance(content, dict):
            content = json.dumps(content)
        data = content.encode() if isinstance(content, str) else content
        path = folder / name.replace("__", ".")
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(data)
    return folder


def test_a_directory_without_a_tokenizer_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerNotFound, match=r"no tokenizer\.json in .*Copy the model"):
        Tokenizer.from_directory(tmp_path)


def test_a_tokenizer_of_another_format_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerNotFound, match=r"has tokenizer\.model, .*save_pretrained"):
        Tokenizer.from_directory(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerNotFound, match=r"there is no directory .*nowhere"):
        Tokenizer.from_directory(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"tokenizer__json": llama3_like().tokenizer_json[:-100]}, r"tokenizer\.json"),
        ({"tokenizer__json": b"\x00\xff"}, r"tokenizer\.json"),
        ({"tokenizer__json": {"model": {}}}, r"tokenizer\.json"),
        ({"tokenizer_config__json": "{"}, r"tokenizer_config\.json is not valid JSON"),
        ({"tokenizer_config__json": "[]"}, r"tokenizer_config\.json must hold a JSON object"),
        ({"special_tokens_map__json": b"\xff"}, r"special_tokens_map\.json"),
        ({"tokenizer_config__json": {"chat_template": 3}}, "chat_template"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "x"}]}}, "chat_template"),
        ({"chat_template__jinja": b"\xff"}, r"chat_template\.jinja is not UTF-8"),
        ({"chat_template__json": {"other": 1}}, r"chat_template\.json"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"1": 3}}}, "added_tokens_decoder"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, names: dict[str, str | bytes | dict[str, object]], message: str
) -> None:
    with pytest.raises(TokenizerDamaged, match=message):
        Tokenizer.from_directory(write(tmp_path, **names))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({}, {}),
        ({"tokenizer_config__json": {"chat_template": "A"}}, {"default": "A"}),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [
                        {"name": "default", "template": "A"},
                        {"name": "tool_use", "template": "B"},
                    ]
                }
            },
            {"default": "A", "tool_use": "B"},
        ),
        ({"chat_template__json": {"chat_template": "C"}}, {"default": "C"}),
        (
            {"tokenizer_config__json": {"chat_template": "A"}, "chat_template__jinja": "D"},
            {"default": "D"},
        ),
        (
            {"chat_template__jinja": "D", "additional_chat_templates/tool_use__jinja": "E"},
            {"default": "D", "tool_use": "E"},
        ),
    ],
)
def test_chat_templates_are_found_wherever_checkpoints_keep_them(
    tmp_path: Path, names: dict[str, str | bytes | dict[str, object]], expected: dict[str, str]
) -> None:
    assert files_of(write(tmp_path, **names)).chat_templates == expected


def test_a_remote_client_builds_the_same_tokenizer_from_the_message() -> None:
    sent = msgspec.msgpack.encode(llama3_like())
    received = msgspec.msgpack.decode(sent, type=TokenizerFiles)
    here, there = Tokenizer.from_files(llama3_like()), Tokenizer.from_files(received)
    messages = [{"role": "user", "content": "the quick 🦊"}]

    assert there.encode_chat(messages) == here.encode_chat(messages)
    assert there.files.digest == here.files.digest


def test_the_digest_changes_with_every_field() -> None:
    base = TokenizerFiles(tokenizer_json=b"{}", chat_templates={"default": CHATML})
    others = [
        msgspec.structs.replace(base, tokenizer_json=b"{ }"),
        msgspec.structs.replace(base, config_json=b"{ }"),
        msgspec.structs.replace(base, special_tokens_json=b"{ }"),
        msgspec.structs.replace(base, tokenizer_json=b"{}{}", config_json=b""),
        msgspec.structs.replace(base, chat_templates={}),
        msgspec.structs.replace(base, chat_templates={"default": ""}),
        msgspec.structs.replace(base, chat_templates={"other": CHATML}),
    ]

    assert len({files.digest for files in (base, *others)}) == 8
    assert (
        base.digest
        == TokenizerFiles(tokenizer_json=b"{}", chat_templates={"default": CHATML}).digest
    )


def test_a_chat_template_of_ones_own_replaces_those_of_the_model(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config__json={"chat_template": "the model's"})
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine", encoding="utf-8")
    assert files_of(tmp_path, chat_template=mine).chat_templates == {"default": "mine"}
    with pytest.raises(TokenizerDamaged, match=r"gone\.jinja cannot be read: No such file"):
        files_of(tmp_path, chat_template=tmp_path / "gone.jinja")
