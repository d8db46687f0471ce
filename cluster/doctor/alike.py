"""Whether two nodes can bear ranks of one group: the same versions, and the same model."""

from pathlib import Path

from cluster.doctor.host_checks import differing_model, differing_versions
from cluster.doctor.model_facts import model_facts
from cluster.doctor.scene import Host, ModelFacts
from cluster.doctor.versions import collect_versions
from cluster.messages import NodeFacts


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


def _host(facts: NodeFacts) -> Host:
    return Host(
        node=facts.node,
        python=facts.python,
        ray=facts.ray,
        torch=facts.torch,
        stoker=facts.stoker,
        model=ModelFacts(digest=facts.model_digest, problem=facts.model_problem),
    )
