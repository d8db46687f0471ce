"""`stoker serve`: a cluster in the foreground, for clients to dial."""

import argparse
import sys
from contextlib import ExitStack

from cluster.announcements import ClusterReady
from cluster.config import load_config
from cluster.errors import StartInterrupted
from cluster.supervisor_main import run_cluster
from stoker.cli import EXIT_INTERRUPTED, EXIT_OK
from stoker.llm import with_model_at_hand
from stoker.running import announced


def serve(arguments: argparse.Namespace) -> int:
    """Run the command until SIGINT or SIGTERM; its first line on standard output says where
    to dial."""
    config = with_model_at_hand(load_config(arguments))
    with ExitStack() as until_end:

        def tell(ready: ClusterReady) -> None:
            until_end.enter_context(
                announced(ready.front_address, ready.model, server_key=ready.server_key)
            )
            print(ready.front_address, flush=True)
            key = f', server_key="{ready.server_key}"' if ready.server_key else ""
            option = f" --server-key '{ready.server_key}'" if ready.server_key else ""
            print(
                f"stoker: serving {ready.model}; dial it with "
                f'Client("{ready.front_address}"{key}), or '
                f"`stoker chat --address {ready.front_address}{option}`. Ctrl-C ends it.",
                file=sys.stderr,
            )

        try:
            run_cluster(config, on_ready=tell)
        except StartInterrupted as error:
            print(f"stoker: {error}", file=sys.stderr)
            return EXIT_INTERRUPTED
    return EXIT_OK
