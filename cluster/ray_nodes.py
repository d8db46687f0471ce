"""Short calls on the nodes of a running Ray cluster, for examinations.

One actor per node, pinned to it, takes no CPU. Nothing here waits without a limit but `connect`,
which Ray does not let anybody interrupt: it belongs into a process that may be killed.
"""

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from cluster.doctor.probe import METHODS, NodeProbe
from cluster.doctor.scene import Room

if TYPE_CHECKING:
    from ray import ObjectRef


class _Method(Protocol):
    def remote(self, *args: object) -> object: ...


class RayNodes:
    """The nodes of the cluster that `connect` has found."""

    def __init__(self) -> None:
        self._id_by_node: dict[str, str] = {}
        self._actors: dict[str, object] = {}

    def connect(self, address: str) -> None:
        """Become a driver of the cluster at `address`.

        Raises:
            Exception: whatever Ray raises; there is no cluster, or it does not want us.
        """
        import ray

        os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)

    def rooms(self) -> tuple[Room, ...]:
        """Every node, this one first. One that has come back is told once."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        known = ray.nodes()  # type: ignore[no-untyped-call]
        living = [node for node in known if node["Alive"]]
        addresses = {str(node["NodeManagerAddress"]) for node in living}
        dead = {
            str(node["NodeManagerAddress"]): node
            for node in known
            if not node["Alive"] and str(node["NodeManagerAddress"]) not in addresses
        }
        living.sort(key=lambda node: (node["NodeID"] != here, str(node["NodeManagerAddress"])))
        free = _free_by_id()
        rooms = []
        for node in [*living, *dead.values()]:
            address = str(node["NodeManagerAddress"])
            name = address
            if name in self._id_by_node:  # a second Ray node at one address
                name = f"{address}/{node['NodeID'][:8]}"
            self._id_by_node[name] = str(node["NodeID"])
            has, left = node["Resources"], free.get(str(node["NodeID"]), {})
            rooms.append(
                Room(
                    node=name,
                    address=address,
                    is_alive=bool(node["Alive"]),
                    cpus=has.get("CPU", 0.0),
                    free_cpus=left.get("CPU", 0.0),
                    gpus=has.get("GPU", 0.0),
                    free_gpus=left.get("GPU", 0.0),
                )
            )
        return tuple(rooms)

    def ask(self, calls: Sequence[tuple[str, str, bytes]], timeout_s: float) -> list[bytes | str]:
        """The answer of each (node, method, argument), or in words why there is none."""
        import ray

        refs = [self._call(*call) for call in calls]
        if not refs:
            return []
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        finished = set(done)
        return [
            _answer(ref) if ref in finished else f"no answer within {timeout_s:.1f} s"
            for ref in refs
        ]

    def _call(self, node: str, method: str, argument: bytes) -> "ObjectRef[bytes]":
        assert method in METHODS, method
        actor = self._actors.get(node)
        if actor is None:
            actor = self._actors[node] = self._start(node)
        remote = cast(_Method, getattr(actor, method))
        return cast("ObjectRef[bytes]", remote.remote(argument))

    def _start(self, node: str) -> object:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return (
            ray.remote(NodeProbe)
            .options(
                num_cpus=0,
                max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    self._id_by_node[node], soft=False
                ),
            )
            .remote()
        )


def _answer(ref: "ObjectRef[bytes]") -> bytes | str:
    import ray

    try:
        return bytes(ray.get(ref))
    except ray.exceptions.RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}"
    except ray.exceptions.RayError as error:
        return " ".join(str(error).split())[:300]


def _free_by_id() -> dict[str, dict[str, float]]:
    """What each node has free; Ray has no public way to ask for it."""
    from ray._private.state import available_resources_per_node

    return dict(available_resources_per_node())  # type: ignore[no-untyped-call]
