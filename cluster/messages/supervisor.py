"""What the supervisor and the engine tell each other: processes, upgrades, the end."""

from msgspec import Struct


class Ping(Struct, frozen=True, tag_field="type", tag="ping"):
    """Supervisor to engine: does your loop turn? Answered by `Pong`."""


class Pong(Struct, frozen=True, tag_field="type", tag="pong"):
    """Answer to `Ping`."""


class SupervisorHello(Struct, frozen=True, kw_only=True, tag_field="type", tag="supervisor_hello"):
    """The first message of the supervisor, which starts and ends processes for the engine."""

    protocol: int
    engine_id: str
    key: str


class AvoidNodes(Struct, frozen=True, tag_field="type", tag="avoid_nodes"):
    """Engine to supervisor: place no ranks on these nodes from now on."""

    nodes: tuple[str, ...]
    """By host name or address"""


class UseModel(Struct, frozen=True, tag_field="type", tag="use_model"):
    """Engine to supervisor: groups that are started from now on load this checkpoint."""

    model_dir: str


class StartGroup(Struct, frozen=True, tag_field="type", tag="start_group"):
    """Engine to supervisor: start the ranks of this group under this epoch."""

    group: int
    epoch: int


class GroupReady(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="group_ready"
):
    """Engine to supervisor: the group takes plans."""

    group: int
    epoch: int
    num_blocks: int
    start_s: dict[str, float] = {}
    """Of the rank that was loaded last, as in its `WorkerHello`"""


class GroupLost(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="group_lost"
):
    """Engine to supervisor: end what is left of this epoch, then say `GroupStopped`."""

    group: int
    epoch: int
    message: str
    rank: int = -1
    """Whose fault it was; -1: the group's."""
    step: int = 0
    restarts: bool = False
    """Whether a `StartGroup` follows."""


class RetireGroup(Struct, frozen=True, tag_field="type", tag="retire_group"):
    """Engine to supervisor: this group is not needed; end its processes, then say
    `GroupStopped`."""

    group: int
    epoch: int
    comes_back: bool = False
    """Whether a `StartGroup` follows that."""


class GroupStopped(Struct, frozen=True, tag_field="type", tag="group_stopped"):
    """Supervisor to engine: no process of this epoch is left."""

    group: int
    epoch: int


class BeginUpgrade(Struct, frozen=True, tag_field="type", tag="begin_upgrade"):
    """Engine to supervisor: a client asks for an upgrade."""


class UpgradeNews(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="upgrade_news"
):
    """Supervisor to engine: how far an upgrade is; fields as in `ClusterUpgraded`."""

    phase: str
    failure: str = ""
    num_done: int = 0


class HandOver(Struct, frozen=True, tag_field="type", tag="hand_over"):
    """Supervisor to engine: end now, and end no request and no worker; another engine follows."""


class RenewGroups(Struct, frozen=True, tag_field="type", tag="renew_groups"):
    """Supervisor to engine: let one group after the other leave and come back."""


class GroupsRenewed(Struct, frozen=True, tag_field="type", tag="groups_renewed"):
    """Engine to supervisor: all groups have come back since `RenewGroups`."""

    failure: str = ""
    """Or one could not, and why."""


class StartPhases(Struct, frozen=True, tag_field="type", tag="start_phases"):
    """Supervisor to engine: everything is up, and this is where the time went."""

    seconds: dict[str, float]
    """By phase, in their order (`cluster.start_phases`)"""


class Shutdown(Struct, frozen=True, kw_only=True, tag_field="type", tag="shutdown"):
    """Supervisor to engine: take no more requests, finish the running ones, end.

    Sent again with a smaller `drain_s`, it shortens the wait.
    """

    drain_s: float
    """Seconds that running requests may still take."""
    message: str = "the engine was asked to stop"
