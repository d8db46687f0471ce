"""Whether a checkpoint is whole on this host, and a digest that differs if another model's is.

Cheap enough for each start: settings and tokenizer are read in full, of each weight file the
header and a few samples spread over it. So a file that was cut off, a missing shard and other
weights of the same shapes are noticed in milliseconds; a single flipped bit is not.
"""

import hashlib
import json
import struct
from pathlib import Path

from cluster.doctor.scene import ModelFacts
from worker.errors import DamagedCheckpoint

SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
INDEX_FILE = "model.safetensors.index.json"
NUM_SAMPLES = 16
SAMPLE_BYTES = 4096
MOST_HEADER_BYTES = 100 << 20
"""What the format's own library takes."""

_WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}
_LENGTH = struct.Struct("<Q")


def model_facts(model_dir: Path) -> ModelFacts:
    """The facts of a checkpoint that may be missing, not whole, or unreadable here."""
    digest = hashlib.blake2b(digest_size=8)
    weight_bytes = width = 0
    try:
        if not (model_dir / "config.json").is_file():
            return ModelFacts(problem=f"{model_dir} has no config.json on this node")
        for name in SMALL_FILES:
            if (model_dir / name).is_file():
                digest.update(name.encode())
                digest.update((model_dir / name).read_bytes())
        for file in weight_files(model_dir):
            file_bytes, width = _add_weights(digest, file)
            weight_bytes += file_bytes
    except DamagedCheckpoint as error:
        return ModelFacts(problem=str(error), weight_bytes=weight_bytes)
    except OSError as error:
        where = error.filename or model_dir
        return ModelFacts(problem=f"{where}: {error.strerror}", weight_bytes=weight_bytes)
    return ModelFacts(digest=digest.hexdigest(), weight_bytes=weight_bytes, bytes_per_weight=width)


def weight_files(model_dir: Path) -> list[Path]:
    """The files that hold the weights, present or not.

    Raises:
        DamagedCheckpoint: none, or an index that cannot be read.
    """
    index = model_dir / INDEX_FILE
    if not index.exists():
        found = sorted(model_dir.glob("*.safetensors"))
        if not found:
            raise DamagedCheckpoint(model_dir, "no *.safetensors file in it")
        return found
    try:
        return [
            model_dir / n
            for n in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(index, f"no index of weight files: {error!r}") from None


def _add_weights(digest: hashlib.blake2b, file: Path) -> tuple[int, int]:
    """Add one file's header and samples; the bytes of its tensors, and of a number in the first.

    Raises:
        DamagedCheckpoint: it is missing, or its size is not what its header says.
    """
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise DamagedCheckpoint(file, f"missing, though {INDEX_FILE} names it") from None
    with file.open("rb") as opened:
        length = opened.read(_LENGTH.size)
        header_bytes = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 0
        if not 0 < header_bytes <= min(size, MOST_HEADER_BYTES):
            raise DamagedCheckpoint(file, f"not a safetensors file ({size} bytes). Fetch it again")
        header = opened.read(header_bytes)
        data_bytes, width = _described(file, header)
        wanted = _LENGTH.size + header_bytes + data_bytes
        if wanted != size:
            raise DamagedCheckpoint(
                file, f"{size} bytes, but its header speaks of {wanted}. Fetch it again"
            )
        digest.update(f"{file.name} {size}".encode())
        digest.update(header)
        for sample in range(NUM_SAMPLES):
            opened.seek(
                (size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1) if size > SAMPLE_BYTES else 0
            )
            digest.update(opened.read(SAMPLE_BYTES))
    return data_bytes, width


def _described(file: Path, header: bytes) -> tuple[int, int]:
    """(bytes of all tensors, bytes of a number of the first one)"""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
        kinds = [str(entry["dtype"]) for entry in entries.values()]
        return max(ends, default=0), _WIDTHS.get(kinds[0] if kinds else "", 0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DamagedCheckpoint(file, f"its header cannot be read: {error!r}") from None
