"""What the process that examines a Ray cluster's nodes is told."""

from msgspec import Struct

from cluster.doctor.collect import Question


class NodesTask(Struct, frozen=True, kw_only=True):
    """Which cluster to examine, and how."""

    address: str
    question: Question
    back_address: str
    limit_s: float
    parent_pid: int
