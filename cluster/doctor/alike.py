"""Whether two nodes can bear ranks of one group: the same versions, and the same model."""

from collections.abc import Callable
from pathlib import Path

from cluster.doctor.host_checks import differing_model, differing_versions
from cluster.doctor.model_facts import model_facts
from cluster.doctor.scene import Host, ModelFacts
from cluster.doctor.versions import collect_versions
from cluster.messages.workers import NodeFacts


def node_facts(node: str, model_dir: Path) -> NodeFacts:
    """Those of this host, in milliseconds."""
    model = model_facts(model_dir)
    return NodeFacts(
        node=node, model_digest=model.digest, model_problem=model.problem, **collect_versions()
    )


def why_not_alike(theirs: NodeFacts, ours: NodeFacts) -> str:
    """What differs between a node and the leader, with both sides and what to do; empty: nothing.

    Where the leader has no model that could be compared, loading it says what is wrong.
    """
    host, leader = _host(theirs), _host(ours)
    problems = list(differing_versions(host, leader))
    if ours.model_digest:
        problems += differing_model(host, leader)
    return "; ".join(f"{p.subject} {p.seen}. Fix: {p.fix}" for p in problems)


class Leader:
    """The engine's host, whom all others must equal; looked at when the first of them comes."""

    def __init__(self, ask: Callable[[Path], NodeFacts] | None, model_dir: Path) -> None:
        """`ask`: its facts, with those of a model's folder; None: nothing must be equal."""
        self._ask = ask
        self._model_dir = model_dir
        self._facts: NodeFacts | None = None

    def use(self, model_dir: Path) -> None:
        """Groups load what is in this folder from now on."""
        self._model_dir, self._facts = model_dir, None

    def difference(self, theirs: NodeFacts) -> str:
        """Why a worker's node cannot be one of ours; empty if it can."""
        if self._ask is None:
            return ""
        if self._facts is None:
            self._facts = self._ask(self._model_dir)
        return why_not_alike(theirs, self._facts)


def _host(facts: NodeFacts) -> Host:
    return Host(
        node=facts.node,
        python=facts.python,
        ray=facts.ray,
        torch=facts.torch,
        stoker=facts.stoker,
        model=ModelFacts(digest=facts.model_digest, problem=facts.model_problem),
    )
