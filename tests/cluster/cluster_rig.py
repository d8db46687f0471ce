"""An engine on real sockets with scripted workers in threads, and clients that speak to it."""

import itertools
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil

from cluster.announcements import EngineListens, read_engine_line
from cluster.backend import WorkerLaunch
from cluster.child_process import ChildProcess
from cluster.engine import Engine
from cluster.engine_launch import EngineLaunch
from cluster.engine_main import open_links
from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.keys import ClientKeys, SocketKeys
from cluster.links.dealer import DealerLink
from cluster.links.sockets import LinkLimits
from cluster.logs import EventLog
from cluster.messages.clients import ClientHello, GenerationDefaults, ServerInfo
from cluster.messages.reports import GroupStatus, Status, StatusRequest
from cluster.messages.sockets import FromClient, FromEngine, ToClient, ToEngine
from cluster.messages.supervisor import Shutdown, SupervisorHello
from cluster.served_model import Checkpoints
from cluster.supervisor import ENGINE_COMMAND
from cluster.wire import FROM_CLIENT, FROM_ENGINE, PROTOCOL_VERSION, TO_CLIENT, TO_ENGINE
from cluster.worker_host import WorkerHost
from scheduler.arrays import int32
from scheduler.config import SchedulerConfig
from scheduler.journal import Record
from scheduler.request import Abort, Finish, Rejection, Request, TokenBatch
from scheduler.sampling import SamplingParams
from tests.cluster.launches import make_launch
from tests.cluster.scripted import Script, ScriptedRunner

KEY = "the key"
WAIT_S = 20.0
TOKENIZER = TokenizerFiles(tokenizer_json=b'{"version": "1.0"}')

Wanted = TypeVar("Wanted")


class TestClient:
    """One connection, message by message."""

    __test__ = False

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        limits = LinkLimits(max_message_bytes=64 << 20)
        self.link = DealerLink(address, limits, keys)
        self._handles = itertools.count(1)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Finish] = {}
        self.messages: dict[int, str] = {}
        self.rejections: dict[int, Rejection] = {}

    def send(self, message: FromClient) -> None:
        self.link.send(FROM_CLIENT.encode(message))

    def next(self, timeout_s: float = WAIT_S) -> ToClient:
        frame = self.link.receive(timeout_s)
        assert frame is not None, "the engine said nothing"
        return TO_CLIENT.decode(frame)

    def next_of(self, kind: type[Wanted]) -> Wanted:
        """Read on, noting news, until a message of this kind comes."""
        while True:
            message = self.next()
            if isinstance(message, kind):
                return message
            self.note(message)

    def hello(self) -> ServerInfo:
        self.send(ClientHello(protocol=PROTOCOL_VERSION, label="test"))
        return self.next_of(ServerInfo)

    def status(self) -> Status:
        self.send(StatusRequest())
        return self.next_of(Status)

    def submit(self, num_prompt: int = 4, max_tokens: int = 5, **fields: object) -> int:
        handle = next(self._handles)
        prompt = int32([(handle * 31 + i) % 900 for i in range(num_prompt)])
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = Request(handle=handle, prompt=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]
        self.send(request)
        return handle

    def abort(self, *handles: int) -> None:
        self.send(Abort(int32(handles)))

    def note(self, message: ToClient) -> None:
        if isinstance(message, Rejection):
            self.rejections[message.handle] = message
        elif isinstance(message, TokenBatch):
            counts = message.count if len(message.count) else np.ones(len(message.handle), int)
            ends = np.cumsum(counts)
            for row, handle in enumerate(message.handle.tolist()):
                new = message.token[ends[row] - counts[row] : ends[row]].tolist()
                self.tokens.setdefault(handle, []).extend(new)
                if len(message.finish) and message.finish[row]:
                    self.ends[handle] = Finish(int(message.finish[row]))
            for ended in message.ended:
                self.messages[ended.handle] = ended.message

    def read_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.note(self.next())

    def finish(self, *handles: int) -> None:
        """Read until these requests have ended or were refused."""
        self.read_until(lambda: all(h in self.ends or h in self.rejections for h in handles))

    def close(self) -> None:
        self.link.close()


class TestSupervisor:
    """The supervisor's side of the back socket."""

    __test__ = False

    def __init__(self, address: str, key: str = KEY, keys: ClientKeys | None = None) -> None:
        self.link = DealerLink(address, LinkLimits(max_message_bytes=64 << 20), keys)
        self.send(SupervisorHello(protocol=PROTOCOL_VERSION, engine_id="engine", key=key))

    def send(self, message: ToEngine) -> None:
        self.link.send(TO_ENGINE.encode(message))

    def next_of(self, kind: type[Wanted]) -> Wanted:
        while True:
            frame = self.link.receive(WAIT_S)
            assert frame is not None, "the engine said nothing"
            message: FromEngine = FROM_ENGINE.decode(frame)
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self.link.close()


class Rig:
    """Use as a context manager; the engine runs from entering on, workers when started.

    `engine` is there unless the engine has a process of its own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        front_address: str | None = None,
        back_address: str | None = None,
        front_keys: SocketKeys | None = None,
        back_keys: SocketKeys | None = None,
        has_own_process: bool = False,
        num_groups: int = 1,
        num_ranks: int = 1,
        num_stages: int = 1,
        max_num_seqs: int = 8,
        step_timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
        max_restarts: int = 0,
        no_workers_s: float = 30.0,
        longest_restart_pause_s: float = 0.05,
        max_groups: int | None = None,
        drain_s: float = 0.0,
        is_one_host: bool = False,
        model_dir: Path = Path("/nowhere"),
        checkpoints: Checkpoints | None = None,
        client_queue: int = 1000,
        max_waiting_requests: int = 100,
        max_plans_in_flight: int = 2,
        allow_chaos: bool = False,
        poison_after: int = 2,
        journal: list[Record] | None = None,
    ) -> None:
        self.launch = EngineLaunch(
            engine_id="engine",
            key=KEY,
            model="scripted",
            model_dir=str(model_dir),
            front_address=front_address or f"ipc://{folder}/front",
            back_address=back_address or f"ipc://{folder}/back",
            front_keys=None if front_keys is None else front_keys.server,
            back_keys=None if back_keys is None else back_keys.server,
            num_groups=num_groups,
            num_ranks=num_ranks,
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=64,
                max_waiting_requests=max_waiting_requests,
                max_plans_in_flight=max_plans_in_flight,
                num_stages=num_stages,
                poison_after=poison_after,
            ),
            step_timeout_s=step_timeout_s,
            start_timeout_s=start_timeout_s,
            max_restarts=max_restarts,
            no_workers_s=no_workers_s,
            longest_restart_pause_s=longest_restart_pause_s,
            max_groups=max_groups,
            drain_s=drain_s,
            is_one_host=is_one_host,
            client_queue=client_queue,
            allow_chaos=allow_chaos,
        )
        self.front_keys = None if front_keys is None else front_keys.client
        self.back_keys = None if back_keys is None else back_keys.client
        self._threads: list[threading.Thread] = []
        self._scripts: list[Script] = []
        self._clients: list[TestClient] = []
        self._supervisors: list[TestSupervisor] = []
        self.exit_codes: dict[str, int] = {}
        self.process: psutil.Process | None = None
        if has_own_process:
            self._start_process()
            return
        self.links = open_links(self.launch)
        self.front, self.back = self.links.front.address, self.links.back.address
        self.engine = Engine(
            self.launch,
            self.links,
            tokenizer=TOKENIZER,
            end_ids=(VOCAB_END,),
            defaults=GenerationDefaults(temperature=0.5),
            journal=None if journal is None else journal.append,
            signals=list,
            clock=time.monotonic,
            log=EventLog("test-engine"),
            checkpoints=checkpoints,
        )
        self._engine_thread = threading.Thread(target=self._run_engine)

    def _start_process(self) -> None:
        child = ChildProcess(ENGINE_COMMAND, self.launch)
        self.process = psutil.Process(child.pid)
        listens = read_engine_line(child.read_line())
        assert isinstance(listens, EngineListens), listens
        self.front, self.back = listens.front_address, listens.back_address

        def wait_for_end() -> None:
            select.select([child.end_fd], (), ())
            child.close(0.0)

        self._engine_thread = threading.Thread(target=wait_for_end)

    def _run_engine(self) -> None:
        try:
            self.engine.run()
        finally:
            self.links.close(linger_s=1.0)

    def __enter__(self) -> "Rig":
        self._engine_thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for script in self._scripts:
            script.released.set()
            if script.hold is not None:
                script.hold.set()
        if self._engine_thread.is_alive():
            self.supervisor()  # which is sent away, should there be one already
            for supervisor in self._supervisors:
                if not supervisor.link.is_closed:
                    supervisor.send(Shutdown(drain_s=0.0))
        self.join()
        for client in self._clients:
            client.close()
        for supervisor in self._supervisors:
            supervisor.close()

    def join(self) -> None:
        """Wait for the engine and all workers to end."""
        for thread in (self._engine_thread, *self._threads):
            thread.join(WAIT_S)
            if self.process is not None and thread.is_alive():
                self.process.kill()
            assert not thread.is_alive(), f"{thread.name} does not end"

    def start_worker(
        self,
        script: Script | None = None,
        *,
        group: int = 0,
        epoch: int = 1,
        rank: int = 0,
        key: str = KEY,
        node: str = "",
    ) -> Script:
        script = script if script is not None else Script()
        launch = make_launch(
            address=self.back,
            key=key,
            group=group,
            epoch=epoch,
            rank=rank,
            num_ranks=self.launch.num_ranks,
            num_stages=self.launch.scheduler.num_stages,
            link_keys=self.back_keys,
            allow_chaos=self.launch.allow_chaos,
        )
        thread = threading.Thread(
            target=self._run_worker, args=(launch, script, node), name=f"worker {launch.name}"
        )
        self._threads.append(thread)
        self._scripts.append(script)
        thread.start()
        return script

    def join_worker(self, name: str) -> None:
        """Wait for the end of a worker (`WorkerLaunch.name`)."""
        for thread in self._threads:
            if thread.name == f"worker {name}":
                thread.join(WAIT_S)
                assert not thread.is_alive(), f"{name} does not end"

    def _run_worker(self, launch: WorkerLaunch, script: Script, node: str) -> None:
        host = WorkerHost(
            launch,
            lambda given: ScriptedRunner(given, script),
            EventLog("test-worker"),
            node=node,
        )
        self.exit_codes[launch.name] = host.run()

    def client(self) -> TestClient:
        """A client that has said hello and was told that the engine is ready."""
        client = self.stranger()
        client.hello()
        return client

    def stranger(self) -> TestClient:
        """A connection that has said nothing yet."""
        client = TestClient(self.front, self.front_keys)
        self._clients.append(client)
        return client

    def supervisor(self, key: str = KEY) -> TestSupervisor:
        supervisor = TestSupervisor(self.back, key, self.back_keys)
        self._supervisors.append(supervisor)
        return supervisor


VOCAB_END = 2


def group_of(status: Status, group: int = 0) -> GroupStatus:
    return status.groups[group]


def wait_for_status(client: TestClient, is_wanted: Callable[[Status], bool]) -> Status:
    """Ask until the engine is as wanted; each question is a round trip, so nothing sleeps."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        status = client.status()
        if is_wanted(status):
            return status
    raise AssertionError(f"the engine stays at {status}")
