"""What keeps weights on each node that ranks are on: a thread here, an actor elsewhere.

An actor takes no CPU of Ray's. It goes with this driver or with its node, and with it what it
kept, which costs the next ranks there nothing but reading.
"""

import contextlib
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, cast

from cluster.logs import EventLog
from cluster.weight_keeper import WeightKeeper

if TYPE_CHECKING:  # Ray reads its settings from the environment when it is imported
    from ray import ObjectRef
    from ray.actor import ActorHandle

START_WAIT_S = 15.0
"""For an actor that was started with the ranks to say where it listens."""


class KeeperActor:
    """The body of an actor: a keeper on its node. Its methods are called from here alone."""

    def __init__(self, key: str) -> None:
        self._keeper = WeightKeeper(key, EventLog("weights"))

    def name(self) -> str:
        """Where ranks of this node come to."""
        return self._keeper.name


class _Method(Protocol):
    def remote(self, *args: object) -> object: ...


class _Actor(Protocol):
    """A handle of a `KeeperActor`; Ray's own types lose its results."""

    @property
    def name(self) -> _Method: ...


class RayKeepers:
    """By node. Driven by the backend's thread."""

    def __init__(self, key: str, log: EventLog) -> None:
        self._key, self._log = key, log
        self._own: WeightKeeper | None = None
        self._actors: dict[str, _Actor] = {}

    def start(self, nodes: Iterable[str]) -> None:
        """Have one on each of these nodes before long."""
        for node in set(nodes) - {_here()}:
            if node not in self._actors:
                self._actors[node] = self._actor_on(node)

    def names(self, nodes: Iterable[str]) -> dict[str, str]:
        """Where each node keeps weights; nodes that do not, or do not say so, are left out."""
        import ray

        nodes = set(nodes)
        self.start(nodes)
        found = {_here(): self._own_name()} if _here() in nodes else {}
        others = sorted(nodes - found.keys())
        asked = {cast("ObjectRef[str]", self._actors[node].name.remote()): node for node in others}
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=START_WAIT_S)
        for answer in done:
            try:
                found[asked[answer]] = ray.get(answer)
            except ray.exceptions.RayError as error:  # another one may be started the next time
                self._give_up(asked[answer], str(error))
        for answer in late:
            self._give_up(asked[answer], f"no answer within {START_WAIT_S:g} s")
        return {node: name for node, name in found.items() if name}

    def close(self) -> None:
        """Keep nothing any more, anywhere. Idempotent."""
        for node in list(self._actors):
            self._kill(node)
        if self._own is not None:
            self._own.close()
            self._own = None

    def _own_name(self) -> str:
        if self._own is None:
            try:
                self._own = WeightKeeper(self._key, self._log)
            except OSError as error:
                self._log.warning("weights_not_kept", error=error)
                return ""
        return self._own.name

    def _actor_on(self, node: str) -> _Actor:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = (
            ray.remote(KeeperActor)
            .options(
                num_cpus=0,
                name=f"stoker-weights-{secrets.token_hex(4)}",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(self._key)
        )
        return cast("_Actor", actor)

    def _give_up(self, node: str, why: str) -> None:
        self._log.warning("weights_not_kept", node=node, error=why)
        self._kill(node)

    def _kill(self, node: str) -> None:
        import ray

        with contextlib.suppress(Exception):  # it is gone already
            ray.kill(cast("ActorHandle[KeeperActor]", self._actors.pop(node)))


def _here() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())
