"""Waits on a Ray's head until all of its nodes are there: `python -m cluster.ray_nodes_main
SECONDS ADDRESS...`.

Prints a table of the nodes, and ends with 1 if one is missing when the time is over; then the
logs of the autoscaler, which starts the others, may say why.
"""

import re
import sys
import time
from pathlib import Path

from cluster.errors import BackendError
from cluster.launcher.ray_log import last_failure
from cluster.logs import EventLog
from cluster.ray_backend import RayBackend

MONITOR_LOGS = Path("/tmp/ray/session_latest/logs")
MONITOR_LINES = 25
LOOK_S = 1.0

TELLING = {
    "monitor.log": re.compile(r".*\b(WARN|ERR|Error)"),  # the rest is a table, every few seconds
    "monitor.err": re.compile(r"(?!Shared connection to|Warning: Permanently added).*\S"),
}
"""How lines begin in each log that are not of every start."""

COMMANDS = "monitor.out"
"""The log of what it does on nodes; with what commands said there."""


def main() -> int:
    limit_s, wanted = float(sys.argv[1]), sys.argv[2:]
    deadline = time.monotonic() + limit_s
    backend = RayBackend(
        lambda _: None, num_ranks=1, cores=(), log=EventLog("nodes"), address="auto"
    )
    try:
        backend.open(limit_s)
        while True:
            there = {node.host: node for node in backend.nodes()}
            missing = [host for host in wanted if host not in there]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(LOOK_S)
    except BackendError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        backend.close(limit_s)
    if missing:
        print(f"{', '.join(missing)} did not join Ray within {limit_s:g} s.")
    for host in wanted:
        node = there.get(host)
        cpus, gpus = (0.0, 0.0) if node is None else (node.total.get(k, 0) for k in ("CPU", "GPU"))
        state = "missing" if node is None else f"{cpus:g} CPU, {gpus:g} GPU"
        print(f"  {host:<16} {state}")
    if missing:
        print(monitor_log(MONITOR_LOGS))
    return 1 if missing else 0


def monitor_log(folder: Path) -> str:
    """What Ray's autoscaler said last that is not of every start."""
    told = {COMMANDS: last_failure(_text(folder / COMMANDS), MONITOR_LINES)}
    for name, telling in TELLING.items():
        lines = [line for line in _text(folder / name).splitlines() if telling.match(line)]
        told[name] = "\n".join(lines[-MONITOR_LINES:])
    found = [f"The end of {folder / name}:\n{text}" for name, text in told.items() if text]
    return "\n".join(found) or f"Ray's autoscaler has told of nothing unusual in {folder}."


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
