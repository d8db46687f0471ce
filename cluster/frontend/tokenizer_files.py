"""The files that make a tokenizer, as one message that the engine can hand to clients.

They are read once, where the model directory is; a remote client builds its tokenizer
from the message and needs no directory.
"""

import hashlib
import json
from pathlib import Path

import msgspec
from msgspec import Struct


class TokenizerNotFound(FileNotFoundError):
    """A directory holds no tokenizer that we can read; the message names the file."""


class TokenizerDamaged(ValueError):
    """A tokenizer file cannot be read as what it should be; the message names it."""


class TokenizerFiles(Struct, frozen=True, kw_only=True, tag_field="type", tag="tokenizer_files"):
    """Everything that turns text into tokens and back, as it lies in the model's directory.

    Several megabytes for large vocabularies, almost all of it `tokenizer_json`.
    """

    tokenizer_json: bytes
    config_json: bytes = b"{}"
    """tokenizer_config.json"""
    special_tokens_json: bytes = b"{}"
    """special_tokens_map.json, which older checkpoints have; the config wins over it."""
    chat_templates: dict[str, str] = {}
    """Jinja sources by name; the usual one is called "default"."""

    @property
    def digest(self) -> str:
        """SHA-256 over all fields, in hex: equal digests make equal tokenizers."""
        total = hashlib.sha256()
        named = [text.encode() for pair in sorted(self.chat_templates.items()) for text in pair]
        for part in (self.tokenizer_json, self.config_json, self.special_tokens_json, *named):
            total.update(len(part).to_bytes(8, "little"))
            total.update(part)
        return total.hexdigest()


def files_of(directory: str | Path, *, chat_template: str | Path = "") -> TokenizerFiles:
    """Read the tokenizer files of a model directory.

    Args:
        chat_template: a file to use instead of all templates of the model.
    Raises:
        TokenizerNotFound: no tokenizer.json there; the message says what was there instead.
        TokenizerDamaged: a file is not valid JSON or not UTF-8, or `chat_template` is not there.
    """
    folder = Path(directory)
    tokenizer_json = folder / "tokenizer.json"
    if not tokenizer_json.is_file():
        raise TokenizerNotFound(_what_is_missing(folder))
    config_json = _read_if_there(folder / "tokenizer_config.json")
    templates = templates_of(config_json, source=str(folder / "tokenizer_config.json"))
    for path in (folder / "chat_template.json", folder / "chat_template.jinja"):
        if path.is_file():
            templates["default"] = _template_in(path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _template_in(path)
    if chat_template:
        templates = {"default": _template_in(Path(chat_template))}
    return TokenizerFiles(
        tokenizer_json=tokenizer_json.read_bytes(),
        config_json=config_json,
        special_tokens_json=_read_if_there(folder / "special_tokens_map.json"),
        chat_templates=templates,
    )


def templates_of(config_json: bytes, *, source: str) -> dict[str, str]:
    """The chat templates that tokenizer_config.json itself carries: one, several, or none."""
    found = json_object(config_json, source).get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    try:
        named = msgspec.convert(found, list[_NamedTemplate])
    except msgspec.ValidationError as error:
        raise TokenizerDamaged(
            f"chat_template in {source} must be a text or a list of named texts: {error}"
        ) from error
    return {one.name: one.template for one in named}


class _NamedTemplate(Struct):
    name: str
    template: str


def json_object(data: bytes, source: str) -> dict[str, object]:
    """Parse a JSON object; `source` names the file in the error.

    Raises:
        TokenizerDamaged: not JSON, or JSON of another kind.
    """
    try:
        value: object = json.loads(data)
    except ValueError as error:  # also UnicodeDecodeError
        raise TokenizerDamaged(f"{source} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerDamaged(f"{source} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_if_there(path: Path) -> bytes:
    if not path.is_file():
        return b"{}"
    data = path.read_bytes()
    json_object(data, str(path))
    return data


def _template_in(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerDamaged(f"chat template {path} cannot be read: {error.strerror}") from error
    if path.suffix == ".json":
        template = json_object(data, str(path)).get("chat_template")
        if not isinstance(template, str):
            raise TokenizerDamaged(f"{path} must hold a text under chat_template")
        return template
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TokenizerDamaged(f"{path} is not UTF-8: {error}") from error


def _what_is_missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no directory {folder}, so no tokenizer.json in it"
    message = f"no tokenizer.json in {folder}"
    others = [name for name in _OTHER_TOKENIZERS if (folder / name).is_file()]
    if others:
        return (
            f"{message}. It has {' and '.join(others)}, which Stoker does not read; load it with "
            "transformers.AutoTokenizer and save_pretrained it into the directory"
        )
    return f"{message}. Copy the model's tokenizer files into it"


_OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
