"""Write requirements.lock: the exact version of everything that Stoker and its tests need.

Run by `make lock` after an upgrade. The versions are those installed in the running environment,
walked from what pyproject.toml names. Torch is left out, with what only its CUDA builds bring:
`make setup` installs it first, and which build of it a machine needs is not for a lock to say.
"""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {"torch", "triton"}
FROM_TORCH = re.compile(r"(nvidia|cuda)-")
BUILD = ["setuptools", "wheel"]
HEADER = """\
# Everything but torch, exactly. Made by `make lock`; do not edit.
# Versions only: which file of a version fits is for pip and its index to say.
"""


def required_by(name: str) -> list[str]:
    """Requirements of an installed distribution that hold on this machine, without extras."""
    from packaging.requirements import Requirement  # comes with ray, huggingface_hub, pytest

    needed = map(Requirement, importlib.metadata.requires(name) or [])
    return [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(direct: list[str]) -> dict[str, str]:
    """Version by canonical name, of `direct` and whatever they need in turn."""
    versions: dict[str, str] = {}
    todo = list(direct)
    while todo:
        name = canonical(todo.pop())
        if name in versions or name in LEFT_OUT or FROM_TORCH.match(name):
            continue
        versions[name] = importlib.metadata.version(name)
        todo += required_by(name)
    return versions


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["dev"], *BUILD]
    direct = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in named]
    lines = [f"{name}=={version}\n" for name, version in sorted(locked_versions(direct).items())]
    (ROOT / "requirements.lock").write_text(HEADER + "".join(lines), encoding="utf-8")
    sys.stdout.write(f"requirements.lock: {len(lines)} packages\n")


if __name__ == "__main__":
    main()
