"""What goes wrong on purpose, in a cluster that allows it."""

from typing import Literal, TypeAlias

from msgspec import Struct

FaultKind: TypeAlias = Literal[
    "kill", "stop", "raise", "slow", "drop", "miss", "delay", "cut", "full"
]
"""What `Fault.kind` may say."""


class Fault(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="fault"):
    """Something that goes wrong on purpose, in a cluster that allows it (`allow_chaos`).

    `kill` and `stop` end or stop the process by a signal; `raise` is an exception in a step, `slow`
    a step that takes longer; `drop` loses answers on their way to the engine, `delay` holds them
    up, `miss` loses plans on their way to a rank; `cut` ends the connection; `full` takes all idle
    KV blocks of a group.
    """

    kind: FaultKind
    step: int = 0
    """When this step of the group begins, or a later one if it has begun; 0: at once. Of kill,
    stop, raise and slow."""
    after_s: float = 0.0
    """So long after that, of kill and stop: also in the middle of a step."""
    seconds: float = 0.0
    """How long it lasts: stop, slow, delay (of each step or answer), full"""
    count: int = 1
    """Steps, answers or plans that it befalls: slow, drop, miss, delay"""


class InjectFault(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="inject_fault"
):
    """Let a fault happen. Answered by `FaultInjected`, unless the engine is what ends."""

    fault: Fault
    group: int = -1
    """-1: all groups, of which those ranks are meant that are on `node`; without a node, the
    engine itself"""
    rank: int = -1
    """-1: all ranks of the group"""
    node: str = ""
    """Only ranks on this node; empty: on any"""


class FaultInjected(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="fault_injected"
):
    """Answer to `InjectFault`."""

    ranks: tuple[tuple[int, int], ...] = ()
    """Group and rank of each that was told"""
    refusal: str = ""
    """Why nothing was done; empty: it was."""
