"""How ranks on several hosts, or on GPUs, find each other: a small store that rank 0 keeps.

Rank 0 listens on one address only, given as a number or a name; nothing here asks what this
host calls itself, since that often resolves to a loopback address.
"""

import socket
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore  # typed here, and only re-exported

from worker.parallel_errors import MeetingFailed, first_line


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket of rank 0 for the other ranks to come to; port 0 takes any that is free.

    Open it first, tell the other ranks its port, then give it to `open_store`.

    Raises:
        MeetingFailed: the address is not this host's, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise MeetingFailed(f"rank 0 cannot listen on {host}:{port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise MeetingFailed(
            f"rank 0 cannot listen on {host}:{port}: {error.strerror}. Give an address of the "
            "host that rank 0 runs on, and a free port or 0."
        ) from error
    return listener


def open_store(
    host: str,
    port: int,
    *,
    rank: int,
    size: int,
    timeout_s: float,
    listener: socket.socket | None = None,
) -> Store:
    """The store at rank 0's `host`:`port`, reached within `timeout_s`. `listener` becomes its own.

    Raises:
        MeetingFailed: rank 0 cannot listen there, or does not.
    """
    limit = timedelta(seconds=timeout_s)
    if rank == 0:
        listener = listener or listen(host, port)
        port = int(listener.getsockname()[1])
        return TCPStore(
            host,
            port,
            size,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    try:
        return TCPStore(host, port, size, is_master=False, timeout=limit, wait_for_workers=False)
    except (dist.DistError, ValueError) as error:
        raise MeetingFailed(
            f"rank {rank} did not reach rank 0 at {host}:{port} within {timeout_s:g} s: "
            f"{first_line(error)}. Look for why rank 0 ended, for a firewall between the hosts, "
            "and whether this host can route to that address."
        ) from error


def address_towards(host: str, port: int) -> str:
    """The address by which this host reaches `host`, and so can be reached from there.

    Raises:
        MeetingFailed: there is no such name, or no route to it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise MeetingFailed(
            f"this host has no route to rank 0 at {host}:{port}: {error}. Give rank 0's host an "
            "address that every host of the group can reach."
        ) from error
