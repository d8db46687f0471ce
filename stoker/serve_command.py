"""`stoker serve`: a cluster in the foreground, for clients to dial and HTTP to call."""

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack

from cluster.announcements import ClusterReady
from cluster.config import load_config_over, load_http_config
from cluster.errors import StartInterrupted
from cluster.supervisor_main import run_cluster
from stoker.cli import EXIT_INTERRUPTED, EXIT_OK
from stoker.llm import with_model_at_hand
from stoker.running import announced

DRAIN_S = 25.0
"""Unless `drain_s` is set: what runs may end before Kubernetes' 30 seconds are over."""


def serve(arguments: argparse.Namespace, run: Callable[..., None] = run_cluster) -> int:
    """Run the command until SIGINT or SIGTERM.

    Its first line on standard output is the address for clients; a second one that of HTTP.
    """
    http = load_http_config(arguments)
    config = with_model_at_hand(load_config_over({"drain_s": DRAIN_S}, arguments))
    with ExitStack() as until_end:

        def tell(ready: ClusterReady) -> None:
            until_end.enter_context(
                announced(
                    ready.front_address,
                    ready.model,
                    key_file=ready.key_file,
                    http_address=ready.http_address,
                )
            )
            print(ready.front_address, flush=True)
            if ready.http_address:
                print(ready.http_address, flush=True)
            print(_greeting(ready), file=sys.stderr)

        try:
            run(config, on_ready=tell, http=http)
        except StartInterrupted as error:
            print(f"stoker: {error}", file=sys.stderr)
            return EXIT_INTERRUPTED
    return EXIT_OK


def _greeting(ready: ClusterReady) -> str:
    key = f', key_file="{ready.key_file}"' if ready.key_file else ""
    option = f" --key-file {ready.key_file}" if ready.key_file else ""
    http = f" at {ready.http_address}" if ready.http_address else ""
    return (
        f"stoker: serving {ready.model}{http}; dial it with "
        f'Client("{ready.front_address}"{key}), or '
        f"`stoker chat --address {ready.front_address}{option}`. Ctrl-C ends it."
    )
