"""Libraries that only some of a cluster's processes load, looked for before any is started."""

import importlib.util
import sys
from collections.abc import Sequence

from cluster.engine_config import EngineConfig
from scheduler.errors import ConfigError


def libraries_of(config: EngineConfig) -> tuple[str, ...]:
    """What workers load that the process which starts them does not."""
    return ("torch", "ray") if config.backend == "ray" else ("torch",)


def check_libraries(names: Sequence[str]) -> None:
    """Refuse a start whose workers would find out seconds later.

    Raises:
        ConfigError: one is not installed.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} cannot be imported by {sys.executable}, and workers need it. "
            "Run the Python of the environment that Stoker was installed into (`make setup` makes "
            f"one, in .venv), or install it: pip install {' '.join(missing)}"
        )
