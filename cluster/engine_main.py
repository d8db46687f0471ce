"""The main of the engine core's process: `python -m cluster.engine_main PARENT_PID < launch`.

It binds both sockets first and says so in one line of JSON on standard output; everything
else goes to the log on standard error. With `--standby` before the PARENT_PID it first says that
its code is loaded, and the launch may come much later.
"""

import gc
import signal
import socket
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import Struct

from cluster.announcements import EngineListens, EngineRefuses, EngineStands, announce
from cluster.doctor.alike import node_facts
from cluster.engine import Engine
from cluster.engine_launch import STANDBY, EngineLaunch
from cluster.errors import AddressError, ModelError
from cluster.frontend.tokenizer_files import (
    TokenizerDamaged,
    TokenizerFiles,
    TokenizerNotFound,
    files_of,
)
from cluster.generation import GenerationFileDamaged, read_generation
from cluster.journal_file import JournalError, JournalFile
from cluster.links.engine_links import EngineLinks
from cluster.links.sockets import LinkLimits
from cluster.logs import EventLog, show_events
from cluster.orphans import die_with_parent
from cluster.served_model import Checkpoints, read_served_model
from cluster.wakeup import SignalPipe
from cluster.wire import FROM_CLIENT, PROTOCOL_VERSION, TO_ENGINE
from worker.host_memory import free_host_bytes


def main() -> int:
    """Serve until the end; the exit code."""
    die_with_parent(int(sys.argv[-1]), signal.SIGTERM)
    if STANDBY in sys.argv:
        announce(EngineStands(protocol=PROTOCOL_VERSION, version=version("stoker")))
    signals = SignalPipe((signal.SIGTERM, signal.SIGINT))
    try:
        launch = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineLaunch)
    except msgspec.DecodeError as error:
        print(f"no launch on standard input: {error}", file=sys.stderr)
        return 2
    show_events("engine", launch.log_level)
    log = EventLog("engine")
    try:
        links = open_links(launch)
    except AddressError as error:
        return _refuse(error)
    try:
        links.wake_on(signals.fd)
        engine, journal = build_engine(launch, links, signals, log)
    except (TokenizerDamaged, GenerationFileDamaged, JournalError) as error:
        links.close(linger_s=0.0)
        return _refuse(error)
    announce(EngineListens(front_address=links.front.address, back_address=links.back.address))
    log.info("engine_listens", front=links.front.address, back=links.back.address)
    calm_collector()
    try:
        engine.run()
    finally:
        links.close(linger_s=launch.last_words_s)
        if journal is not None:
            journal.close()
    return 0


def calm_collector() -> None:
    """Make Python look for reference cycles rarely: there are hardly any in the engine core.

    What is there at the start stays and is not looked through again; sequences come by the
    thousand, are freed by their counts, and should not be looked through while they wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def open_links(launch: EngineLaunch) -> EngineLinks:
    """Bind both sockets.

    Raises:
        AddressError: one cannot be bound.
    """
    return EngineLinks(
        launch.front_address,
        launch.back_address,
        front_limits=LinkLimits(
            max_message_bytes=FROM_CLIENT.max_bytes,
            queue_messages=launch.client_queue,
            peer_timeout_s=launch.peer_timeout_s,
        ),
        back_limits=LinkLimits(
            max_message_bytes=TO_ENGINE.max_bytes, peer_timeout_s=launch.peer_timeout_s
        ),
        front_keys=launch.front_keys,
        back_keys=launch.back_keys,
    )


def build_engine(
    launch: EngineLaunch, links: EngineLinks, signals: SignalPipe, log: EventLog
) -> tuple[Engine, JournalFile | None]:
    """The engine, with what the model's directory says.

    Raises:
        TokenizerDamaged, GenerationFileDamaged: a file of the model cannot be read.
        JournalError: the journal cannot be written.
    """
    model_dir = Path(launch.model_dir)
    end_ids, defaults = read_generation(model_dir)
    log.info("generation_defaults", model=launch.model, end_ids=end_ids, **_given(defaults))
    journal = JournalFile(Path(launch.journal), log) if launch.journal else None
    engine = Engine(
        launch,
        links,
        tokenizer=_tokenizer_of(model_dir, launch.chat_template, log),
        end_ids=end_ids,
        defaults=defaults,
        journal=None if journal is None else journal.write,
        signals=signals.read,
        clock=time.monotonic,
        log=log,
        facts=partial(node_facts, socket.gethostname()),
        free_bytes=free_host_bytes,
        checkpoints=_checkpoints_of(launch, log),
    )
    return engine, journal


def _checkpoints_of(launch: EngineLaunch, log: EventLog) -> Checkpoints | None:
    """What weights may be exchanged for; a damaged checkpoint is left to the workers, who say
    more of it."""
    try:
        served = read_served_model(Path(launch.model_dir), launch.chat_template)
    except ModelError as error:
        log.warning("no_reload", error=error)
        return None
    return Checkpoints(served, Path(launch.models_dir), launch.chat_template)


def _given(defaults: Struct) -> dict[str, object]:
    return {k: v for k, v in msgspec.structs.asdict(defaults).items() if v is not None}


def _tokenizer_of(model_dir: Path, chat_template: str, log: EventLog) -> TokenizerFiles | None:
    try:
        return files_of(model_dir, chat_template=chat_template)
    except TokenizerNotFound as error:
        log.warning("no_tokenizer", error=error)
        return None


def _refuse(error: Exception) -> int:
    announce(EngineRefuses(message=str(error)))
    return 1


if __name__ == "__main__":
    sys.exit(main())
