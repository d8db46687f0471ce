"""What the engine process is told when it starts."""

from typing import Literal

from msgspec import Struct

from cluster.keys import ServerKeys
from scheduler.config import SchedulerConfig

STANDBY = "--standby"
"""Argument of the process: say when the code is loaded, and wait for the launch."""


class GroupEpoch(Struct, frozen=True):
    """Where a worker group is that another engine process began."""

    group: int
    epoch: int
    state: Literal["ready", "starting", "stopped", "retired"]
    """ready: its ranks have their weights, and come by themselves; starting: they are on their way,
    or are being ended; stopped, retired: there are none, and none will come"""
    was_ready: bool = False
    """In this epoch or before"""


class EngineLaunch(Struct, frozen=True, kw_only=True):
    """All that the engine core knows of the outside. It imports neither torch nor ray."""

    engine_id: str
    """Of the whole cluster's start; workers and the supervisor carry it in their hello."""
    key: str
    """Shown by workers and the supervisor in their hello; clients do not know it."""
    number: int = 1
    """Of the engine's processes, this one"""
    num_restarts: int = 0
    """Of the engine, because it had ended unasked or hung"""
    last_loss: str = ""
    """How the one before ended"""
    epochs: tuple[GroupEpoch, ...] = ()
    """Groups that the engine before had, all of them; empty: `num_groups` begin anew."""
    takeover_s: float = 30.0
    """How long their ranks have to come."""
    model: str
    """The name that clients see."""
    model_dir: str
    models_dir: str = ""
    """Where other checkpoints may be, by name."""
    chat_template: str = ""
    """Path of a file to use instead of the model's own."""
    front_address: str
    back_address: str
    num_groups: int
    """That are wanted at the start."""
    min_groups: int | None = None
    max_groups: int | None = None
    """Of which there may be while it runs; None: as many as can be started."""
    drain_s: float = 0.0
    """For what runs in a group that leaves."""
    drained_nodes: tuple[str, ...] = ()
    """On which no groups start; by host name or address."""
    num_ranks: int
    """Of each group."""
    is_one_host: bool = False
    """Whether all ranks have to be on the engine's host."""
    scheduler: SchedulerConfig
    start_timeout_s: float = 300.0
    step_timeout_s: float = 60.0
    peer_timeout_s: float = 10.0
    last_words_s: float = 1.0
    """How long the last messages may take to leave when the engine ends."""
    max_restarts: int = 0
    no_workers_s: float = 30.0
    """How long requests wait for a group when there is none."""
    client_queue: int = 1000
    front_keys: ServerKeys | None = None
    back_keys: ServerKeys | None = None
    """With them, a tcp:// socket is encrypted."""
    longest_restart_pause_s: float = 30.0
    allow_chaos: bool = False
    """Whether clients may inject faults."""
    journal: str = ""
    log_level: str = "info"

    @property
    def instance(self) -> str:
        """What clients know this process by: the handles that another one knows mean nothing."""
        return self.engine_id if self.number == 1 else f"{self.engine_id}.{self.number}"
