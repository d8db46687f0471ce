"""What clients may want changed of a cluster that serves, and what they are answered."""

from typing import TypeAlias

from msgspec import Struct


class ScaleGroups(Struct, frozen=True, tag_field="type", tag="scale_groups"):
    """Have so many worker groups from now on. Answered by `Scaled`."""

    num_groups: int | None
    """None: as many as load asks for, between `min_groups` and `max_groups`."""


class Scaled(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="scaled"):
    """Answer to `ScaleGroups`: what the engine aims at now. Groups start and leave meanwhile."""

    num_groups: int
    """That are wanted"""
    is_automatic: bool = False
    """Whether load decides"""
    refusal: str = ""
    """Why nothing was changed; empty: it was."""


class DrainNode(Struct, frozen=True, tag_field="type", tag="drain_node"):
    """Take every worker group off this node at once, and start none there. Answered by
    `NodeDrained`; sent again, it says how far that is."""

    node: str
    """Its host name as `RankStatus.host` has it, or the address by which Ray knows it"""
    undo: bool = False
    """Groups may start there again."""


class NodeDrained(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="node_drained"
):
    """Answer to `DrainNode`."""

    nodes: tuple[str, ...] = ()
    """That take no groups now"""
    num_leaving: int = 0
    """Groups that have processes on the node still"""
    waits_for: str = ""
    """What has to be before the groups can leave; empty: nothing."""
    refusal: str = ""
    """Why nothing was changed; empty: it was."""


class ReloadModel(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="reload_model"
):
    """Let one worker group after the other come back with other weights. Answered by
    `ModelReloaded`."""

    model: str = ""
    """A folder on the engine's host, or a name in its models directory; empty: what is in the
    same folder now"""
    only_asks: bool = False
    """Begin nothing: how far is it?"""


class ModelReloaded(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="model_reloaded"
):
    """Answer to `ReloadModel`: how far the one is that runs, or ran last."""

    model_dir: str = ""
    """Whose weights groups load that start now"""
    is_running: bool = False
    num_groups: int = 0
    num_done: int = 0
    """Groups that are back"""
    failure: str = ""
    """Why it was given up; the groups go back, or have gone back, to the old weights."""
    refusal: str = ""
    """Why nothing was begun; empty: it was."""


class UpgradeCluster(Struct, frozen=True, tag_field="type", tag="upgrade_cluster"):
    """Replace every process of the cluster but the supervisor's by one that runs the code that is
    installed now. Answered by `ClusterUpgraded`."""

    only_asks: bool = False
    """Begin nothing: how far is it?"""


class ClusterUpgraded(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="cluster_upgraded"
):
    """Answer to `UpgradeCluster`, as the supervisor has told the engine last."""

    phase: str
    """idle, prepare (a new engine loads its code), hand_over, take_over (it takes the groups over),
    renew (they come back one by one) or servers (so do the API servers)"""
    failure: str = ""
    """Why the last one was given up; what had been replaced by then stays."""
    num_done: int = 0
    """Upgrades that have come to their end, whatever it was"""
    refusal: str = ""
    """Why nothing was begun; empty: it was."""


Change: TypeAlias = ScaleGroups | DrainNode | ReloadModel
"""What clients may want changed of the worker groups."""


Changed: TypeAlias = Scaled | NodeDrained | ModelReloaded
"""What they are answered."""
