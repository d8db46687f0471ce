"""`stoker up` and `stoker down`: a cluster over several machines, from one short file."""

import argparse
import sys
from pathlib import Path

from cluster.errors import StartFailed
from cluster.launcher.cluster_file import read_cluster_file
from cluster.launcher.launcher import Launcher
from stoker.cli import EXIT_OK


def up(arguments: argparse.Namespace) -> int:
    """Bring it up; prints the address of HTTP, then that for clients."""
    ending = f"`stoker down {arguments.file}` ends"
    try:
        started = _launcher(arguments).up()
    except StartFailed as error:
        raise StartFailed(f"{error}\n{ending} what runs of it already") from error
    print(started.http)
    print(started.front)
    for name, use in (
        ("api_key", "the key for HTTP (Authorization: Bearer ...)"),
        ("key", "the key file for Client(..., key_file=...) and --key-file"),
    ):
        if (started.folder / name).exists():
            _say(f"{started.folder / name} is {use}")
    _say(f"{ending} it")
    return EXIT_OK


def down(arguments: argparse.Namespace) -> int:
    """End it; nothing of it is left on any node."""
    _launcher(arguments).down()
    _say("nothing is left on any node")
    return EXIT_OK


def _launcher(arguments: argparse.Namespace) -> Launcher:
    file = read_cluster_file(Path(arguments.file))
    return Launcher(file, Path.home() / ".stoker" / file.name, _say)


def _say(text: str) -> None:
    print(f"stoker: {text}", file=sys.stderr)
