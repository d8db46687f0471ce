"""The main of a rank nursery: `python -m cluster.nursery_main ORDERS_FD SUPERVISOR_PID`.

It loads the code of a rank, torch above all, and then forks a rank for each order. The rank's
launch comes on its standard input, as if it had been started as `cluster.worker_main`. Ranks are
handed to the supervisor at once, as its own children: the end of the nursery is nobody's loss.
"""

import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from cluster import worker_main
from cluster.orphans import die_with_parent, name_process, wait_for_adoption
from cluster.rank_nursery import NAME, ORDER, PID_BYTES, READY, encode_pid


def main(
    load: Callable[[], None] | None = None, be_rank: Callable[[], int] = worker_main.main
) -> int:
    """Fork ranks until the supervisor closes the orders' socket; the exit code.

    Args:
        load: what takes time and is done once; None: `load_code`.
        be_rank: the main of each rank; its argument is the supervisor's process id.
    """
    orders_fd, supervisor = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(supervisor)
    name_process(NAME)
    (load or load_code)()
    with socket.socket(fileno=orders_fd) as orders:
        orders.sendall(READY)
        while True:
            order, descriptors, _, _ = socket.recv_fds(orders, len(ORDER), 2)
            if not order:
                return 0
            rank = partial(_be_rank, orders_fd, supervisor, descriptors, be_rank)
            orders.sendall(encode_pid(_fork(rank)))
            for fd in descriptors:
                os.close(fd)


def load_code() -> None:
    """Import what ranks need, on one thread: a fork takes no others along."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's; nothing of ours computes there
    worker_main.settle_process(num_threads=len(os.sched_getaffinity(0)))
    import cluster.model_runners  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection would write to pages that all ranks share


def _fork(rank: Callable[[], NoReturn]) -> int:
    """The process id of a new rank; 0: there is none.

    The process between it and us has ended when this returns: the rank is the supervisor's child.
    """
    reading, writing = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _fork_and_end(rank, writing)
        os.waitpid(between, 0)
    except OSError:
        os.write(writing, encode_pid(0))
    os.close(writing)
    with open(reading, "rb") as pipe:
        return int.from_bytes(pipe.read(PID_BYTES), sys.byteorder)


def _fork_and_end(rank: Callable[[], NoReturn], pid_pipe: int) -> NoReturn:
    pid = 0
    try:
        pid = os.fork()
        if pid == 0:
            os.close(pid_pipe)
            rank()
        os.write(pid_pipe, encode_pid(pid))
    finally:
        os._exit(0)


def _be_rank(
    orders_fd: int, supervisor: int, descriptors: list[int], main: Callable[[], int]
) -> NoReturn:
    code = 1
    try:
        os.close(orders_fd)
        stdin, output = descriptors
        for there, here in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(there, here)
        for fd in descriptors:
            os.close(fd)
        os.setpgid(0, 0)  # Ctrl-C in a terminal is the supervisor's to handle
        wait_for_adoption(supervisor)
        sys.argv[1:] = [str(supervisor)]
        code = main()
    except BaseException:
        traceback.print_exc()
    worker_main.end_process(code)


if __name__ == "__main__":
    worker_main.end_process(main())
