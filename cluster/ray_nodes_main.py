"""Waits on a Ray's head until all of its nodes are there: `python -m cluster.ray_nodes_main
SECONDS ADDRESS...`.

Prints a table of the nodes, and ends with 1 if one is missing when the time is over; then the
end of the autoscaler's log says why.
"""

import sys
import time
from pathlib import Path

from cluster.errors import BackendError
from cluster.logs import EventLog
from cluster.ray_backend import RayBackend

MONITOR_LOGS = Path("/tmp/ray/session_latest/logs")
MONITOR_LINES = 15
LOOK_S = 1.0


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
    for host in wanted:
        node = there.get(host)
        cpus, gpus = (0.0, 0.0) if node is None else (node.total.get(k, 0) for k in ("CPU", "GPU"))
        state = "missing" if node is None else f"{cpus:g} CPU, {gpus:g} GPU"
        print(f"  {host:<16} {state}")
    if missing:
        print(f"{', '.join(missing)} did not join Ray within {limit_s:g} s.", file=sys.stderr)
        print(monitor_log(MONITOR_LOGS), file=sys.stderr)
    return 1 if missing else 0


def monitor_log(folder: Path) -> str:
    """The last words of Ray's autoscaler, which starts the workers."""
    found = []
    for name in ("monitor.log", "monitor.out", "monitor.err"):
        path = folder / name
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                found += [f"The end of {path}:", *lines[-MONITOR_LINES:]]
    return "\n".join(found) or f"There is no log of Ray's autoscaler in {folder}."


if __name__ == "__main__":
    sys.exit(main())
