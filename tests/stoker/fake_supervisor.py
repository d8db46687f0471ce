"""A supervisor without a cluster, as a process: `python -m tests.stoker.fake_supervisor MODE`.

Reads its settings and says its line like the real one, then serves a scripted engine until
its standard input ends.
"""

import os
import sys
import tempfile
from pathlib import Path

from cluster.announcements import ClusterFailed, ClusterReady, announce
from cluster.config import decode_config
from tests.cluster.frontend.fake_engine import FakeEngine, answer_at_once, ipc_address, say_nothing

MODES = ("ready", "busy", "fails", "dies", "silent", "stubborn", "babbles")


def main(mode: str) -> int:
    config = decode_config(sys.stdin.buffer.readline())
    if mode == "fails":
        announce(ClusterFailed(message="port 9 is in use"))
        return 1
    if mode == "dies":
        return 3
    if mode == "babbles":
        print("hello there", flush=True)
    elif mode == "silent":
        pass
    else:
        return serve(mode, config.model or "smollm2")
    while os.read(0, 4096):
        pass
    return 0


def serve(mode: str, model: str) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="fake-stoker-") as folder,
        FakeEngine(
            ipc_address(Path(folder)), script=say_nothing if mode == "busy" else answer_at_once
        ) as engine,
    ):
        announce(ClusterReady(front_address=engine.address, engine_id="fake", model=model))
        while os.read(0, 4096):
            pass
        while mode == "stubborn":
            engine.received.get()
    return 0


if __name__ == "__main__":
    assert sys.argv[1] in MODES
    sys.exit(main(sys.argv[1]))
