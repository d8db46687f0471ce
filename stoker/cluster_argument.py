"""The cluster that a command works with: one that it starts, or one that runs already."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.client import Client

CONNECT_TIMEOUT_S = 30.0


@contextmanager
def cluster_of(arguments: argparse.Namespace) -> Iterator[Client]:
    """A client of the cluster at `--address`, or of one that is started and ended here."""
    if arguments.address is not None:
        with Client(
            arguments.address,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            key_file=vars(arguments).get("key_file"),
        ) as client:
            yield client
        return
    from cluster.config import load_config_over
    from cluster.logs import show_events
    from stoker.llm import LLM, QUIET

    config = load_config_over(QUIET, arguments)
    show_events("client", config.log_level)
    with LLM.of_config(config) as llm:
        yield llm.client
