"""The versions that nodes must have in common, without importing what they are versions of."""

import platform
import re
from importlib.metadata import PackageNotFoundError, distribution


def collect_versions() -> dict[str, str]:
    """Of Python and of what ranks must have in the same version; empty: not installed."""
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in ("ray", "torch", "stoker")},
    }


def _version(package: str) -> str:
    try:
        described = distribution(package).read_text("METADATA") or ""
    except PackageNotFoundError:
        return ""
    # Parsing all of it, as `importlib.metadata.version` does, takes 5 ms each.
    found = re.search(r"^Version: (\S+)", described, re.MULTILINE)
    return found[1] if found else ""
