"""What a backend does: it places worker processes, starts them, watches them, ends them.

Two exist: plain processes (`cluster.local_backend`) and Ray actors (`cluster.ray_backend`).
Neither is in the path of a step. A backend is driven by one thread, which lives as long as
the backend; only `report` is called from others.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec
from msgspec import Struct

from cluster.keys import ClientKeys
from cluster.loss_reasons import LossReason


class RunnerSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank needs to build its `worker.config.RunnerConfig`."""

    model_dir: str
    dtype: str
    device: str
    ops: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    gpu_memory_utilization: float
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    num_kv_blocks: int | None = None
    enforce_eager: bool = False
    quantization: str = "none"
    num_threads: int = 1
    """Compute threads of this rank."""
    ranks_on_host: int = 1
    """Ranks, of all groups, that share the memory of this rank's host."""


class Rendezvous(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the ranks of a group find each other for their collectives."""

    name: str
    """Carries engine, group and epoch; files in shared memory are named after it."""
    is_one_host: bool = True
    """CPU ranks of one host meet in shared memory and need the name alone."""
    nodes: tuple[int, ...] = ()
    """By rank, a number of its host; empty: all are on one host. Stages and neighbours of one
    host share memory even if the group has several."""
    hosts: tuple[str, ...] = ()
    """By rank, where the others reach its host; empty if that is known otherwise."""
    store_host: str = ""
    """Address of rank 0's host, if the ranks are on several hosts or on GPUs."""
    store_port: int = 0
    listener_fd: int | None = None
    """For rank 0: a socket that listens there already, inherited from the backend."""
    start_timeout_s: float = 60.0
    """Longest wait for the other ranks to come."""
    timeout_s: float = 60.0
    """Longest wait of one collective, after which the rank gives up and says so."""


class WorkerLaunch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that one worker process is told when it starts."""

    engine_id: str
    key: str
    """The engine's secret, which the worker shows in its hello."""
    address: str
    """Of the engine's back socket."""
    group: int
    epoch: int
    rank: int
    num_ranks: int
    """Of the group, stage after stage."""
    runner: RunnerSpec
    rendezvous: Rendezvous
    pipeline_parallel_size: int = 1
    """Stages of the group."""
    cores: tuple[int, ...] = ()
    """Cores that the process is pinned to; empty: wherever it likes."""
    gpu: int = 0
    """Which of the GPUs that the process sees, if it computes on one."""
    log_level: str = "info"
    engine_timeout_s: float = 10.0
    """A worker that has not heard from the engine for this long ends itself."""
    connect_timeout_s: float = 60.0
    """Longest wait for the engine to appear."""
    takeover_s: float = 0.0
    """How long a worker whose engine is gone waits for another one; 0: it ends."""
    link_keys: ClientKeys | None = None
    """To dial the back socket with, if it is encrypted."""
    allow_chaos: bool = False
    """Whether faults may be injected here."""
    keeper: str = ""
    """Where packed weights are kept on this host (`cluster.weight_keeper`); empty: nowhere."""

    @property
    def name(self) -> str:
        """For logs: group.epoch.rank."""
        return f"{self.group}.{self.epoch}.{self.rank}"


def encode_launch(launch: WorkerLaunch) -> bytes:
    """The launch as JSON, for a process's standard input or an actor's argument."""
    return msgspec.json.encode(launch)


def decode_launch(data: bytes) -> WorkerLaunch:
    """Read what `encode_launch` wrote.

    Raises:
        msgspec.ValidationError: a field is missing or of the wrong type.
        msgspec.DecodeError: it is not JSON, for example because the parent died writing it.
    """
    return msgspec.json.decode(data, type=WorkerLaunch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank will run."""

    rank: int
    node: str
    """The backend's name of the machine; ranks with equal names share memory."""
    host: str
    """Address at which other nodes reach that machine."""
    cores: tuple[int, ...] = ()
    """Cores for this rank alone; empty: not pinned."""
    gpu: int = 0
    """Which of the GPUs that its process will see."""
    ranks_on_host: int | None = None
    """Ranks, of all groups, on that machine; None: as many of each group as of this one."""
    keeper: str = ""
    """Where that machine keeps packed weights (`cluster.weight_keeper`); empty: nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """A worker process is gone. Reported once for each rank that was started."""

    group: int
    epoch: int
    rank: int
    message: str
    """How it ended: exit code, signal, or what Ray says of it; with its last words if it left
    some on its standard error."""
    was_asked: bool = False
    """It ended because `stop` or `close` ended it."""
    reason: LossReason = "died"
    """What its group is lost for, if it was not asked."""


Report: TypeAlias = Callable[[RankExit], None]
"""Takes a notice from any thread, at once, without blocking."""


class Backend(Protocol):
    """Places, starts, watches and ends worker processes.

    Every call is bounded by its `timeout_s` and raises `BackendError` when that is over, with
    what was wanted and what there was. After `close` nothing that it started is left, however
    far `open`, `place` or `start` had come; `close` may be called twice.
    """

    def open(self, timeout_s: float) -> str:
        """Bring up, or connect to, what the ranks run on.

        Returns the address at which its other nodes reach this host; empty if all ranks are here.
        """
        ...

    def avoid(self, nodes: Collection[str]) -> None:
        """Place no ranks on these nodes from now on, and again on those that were avoided before
        and are not named.

        Args:
            nodes: by host name, or by the address at which other nodes reach them.
        """
        ...

    def forget_code(self) -> None:
        """Start ranks from now on with the code that is installed now."""
        ...

    def place(
        self, group: int, epoch: int, num_stages: int, ranks_per_stage: int, timeout_s: float
    ) -> tuple[Place, ...]:
        """Take room for all ranks, the ranks of a stage together if that can be; place i is
        rank i's, stage after stage.

        Raises:
            BackendError: there is not room for all; none was taken. The message says what
                was asked, what is free, and which nodes there are.
        """
        ...

    def start(self, launches: Sequence[WorkerLaunch], timeout_s: float) -> None:
        """Start one process per launch, all of one group, in the places taken for them.

        Returns when they are started, not when they are ready: they tell the engine.
        """
        ...

    def stop(self, group: int, epoch: int, timeout_s: float) -> None:
        """End the ranks of a group and give its places back.

        Asks nicely, then kills when `timeout_s` is over. None is left when it returns; a
        group that is gone or was never started is no error.
        """
        ...

    def give_up(self) -> None:
        """Wait for no room any longer, since `close` comes next; from any thread, at once."""
        ...

    def close(self, timeout_s: float) -> None:
        """End all ranks and all that `open` started."""
        ...
