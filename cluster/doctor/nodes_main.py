"""The main of the process that asks a Ray cluster's nodes: `python -m cluster.doctor.nodes_main`.

Standard input is one `NodesTask` as JSON; each line of standard output is a `Survey` that knows
more than the one before. It may be killed at any time; its actors end with it.
"""

import sys
import time

import msgspec

from cluster.doctor.nodes_task import NodesTask
from cluster.doctor.survey import Survey, survey
from cluster.orphans import die_with_parent
from cluster.ray_nodes import RayNodes


def main() -> int:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=NodesTask)
    die_with_parent(task.parent_pid)
    deadline = time.monotonic() + task.limit_s
    nodes = RayNodes()
    try:
        nodes.connect(task.address)
    except Exception as error:  # Ray's, of many kinds: said to whoever reads
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    known = survey(
        nodes,
        task.question,
        back_address=task.back_address,
        deadline=deadline,
        tell=_tell,
    )
    _tell(msgspec.structs.replace(known, is_complete=True))
    return 0


def _tell(known: Survey) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(known) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
