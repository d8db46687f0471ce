"""The running cluster that a command is about."""

import argparse

from cluster.errors import AddressError
from stoker.client import Client
from stoker.running import running_clusters


def client_for(arguments: argparse.Namespace, label: str) -> Client:
    """A client of the cluster at `--address`, or of the only one of this user.

    Raises:
        AddressError: there are several, or none.
    """
    return Client(arguments.address or _only_address(), label=label, key_file=arguments.key_file)


def _only_address() -> str:
    running = [cluster.address for cluster in running_clusters()]
    if len(running) != 1:
        found = ", ".join(sorted(running)) or "none"
        raise AddressError(f"name the cluster with --address; running for this user: {found}")
    return running[0]
