"""A nursery whose ranks run the line of Python that comes on their standard input."""

import sys

from cluster.nursery_main import main
from cluster.orphans import name_process
from cluster.worker_main import NAME, end_process


def be_rank() -> int:
    """The exit code is what the line leaves in `code`."""
    name_process(NAME)
    known = {"code": 0}
    exec(sys.stdin.read(), known)
    return known["code"]


if __name__ == "__main__":
    end_process(main(load=lambda: None, be_rank=be_rank))
