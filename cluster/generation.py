"""What a model's own files say of generation: its end tokens and its sampling defaults."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from cluster.messages.clients import GenerationDefaults


class GenerationFileDamaged(ValueError):
    """config.json or generation_config.json is not what it should be; the message says how."""


class _Generation(Struct):
    """The fields of generation_config.json, and of config.json, that we use."""

    eos_token_id: int | list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def read_generation(model_dir: Path) -> tuple[tuple[int, ...], GenerationDefaults]:
    """End tokens (of both files, for checkpoints keep some in either) and defaults.

    Raises:
        GenerationFileDamaged: a file is not JSON, or a field is of another type.
    """
    own = _read(model_dir / "generation_config.json")
    config = _read(model_dir / "config.json")
    end_ids = tuple(dict.fromkeys([*_ids(own.eos_token_id), *_ids(config.eos_token_id)]))
    return end_ids, GenerationDefaults(
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        min_p=own.min_p,
        repetition_penalty=own.repetition_penalty,
        max_tokens=own.max_new_tokens,
    )


def _read(path: Path) -> _Generation:
    if not path.is_file():
        return _Generation()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Generation)
    except msgspec.DecodeError as error:
        raise GenerationFileDamaged(f"{path}: {error}") from error


def _ids(value: int | list[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return value if isinstance(value, list) else (value,)
