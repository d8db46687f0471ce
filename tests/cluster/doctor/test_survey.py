"""An examination of several nodes: loopback addresses of this machine with real connections."""

import itertools
import socket
import time
from collections.abc import Iterator

import pytest

from cluster.doctor import survey as survey_module
from cluster.doctor.checks import examine
from cluster.doctor.collect import Question
from cluster.doctor.examination import read_survey, scene_of
from cluster.doctor.probe import Echo, Target, reach
from cluster.doctor.scene import Asked, Finding
from cluster.doctor.survey import Survey, rounds_of, survey
from tests.cluster.doctor.local_nodes import LocalNodes
from tests.cluster.doctor.scenes import make_host

NAMES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
ABOUT_PLACES = ("addresses", "host names", "routes")
"""Checks for which these nodes are no machines."""


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalNodes]:
    monkeypatch.setattr("cluster.doctor.probe._load_libraries", lambda: None)  # of torch
    nodes = LocalNodes(*NAMES)
    yield nodes
    nodes.close()


@pytest.fixture
def dropping_port() -> Iterator[int]:
    """A listener at the second node that takes nobody any more: its queue is full."""
    with socket.socket() as listener:
        listener.bind((NAMES[1], 0))
        listener.listen(0)
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(2)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        yield int(address[1])
        for one in waiting:
            one.close()


def run_survey(nodes: LocalNodes, *, deadline_s: float = 60.0, back: str = "") -> Survey:
    told: list[Survey] = []
    found = survey(
        nodes,
        Question(node=""),
        back_address=back,
        deadline=time.monotonic() + deadline_s,
        tell=told.append,
    )
    assert told, "nothing was told before the end"
    return found


def alarms_of(found: Survey) -> list[Finding]:
    here = found.hosts[0]
    scene = scene_of(Asked(num_ranks=2, uses_ray=True), here, found, "")
    return [f for f in examine(scene) if f.level != "ok" and f.check not in ABOUT_PLACES]


def test_healthy_nodes_reach_each_other_both_ways_and_raise_no_alarm(nodes: LocalNodes) -> None:
    found = run_survey(nodes)

    ways = {(path.source, path.target) for path in found.paths}
    assert ways == set(itertools.permutations(NAMES, 2))
    assert all(path.rtt_s > 0 for path in found.paths)
    assert {frozenset(pair.nodes) for pair in found.pairs} == {
        frozenset(pair) for pair in itertools.combinations(NAMES, 2)
    }
    assert alarms_of(found) == []


def test_a_port_that_takes_nobody_is_named_within_its_limit(
    nodes: LocalNodes, dropping_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey_module, "REACH_S", 0.3)
    nodes.closed_ports[NAMES[1]] = dropping_port

    alarms = alarms_of(run_survey(nodes))

    assert {alarm.subject for alarm in alarms} == {f"node {NAMES[1]}"}
    assert {alarm.check for alarm in alarms} == {"ports"}
    assert all("no answer in 0.3 s" in alarm.seen for alarm in alarms)


def test_a_port_that_refuses_is_named(nodes: LocalNodes) -> None:
    nodes.closed_ports[NAMES[2]] = 1  # nobody listens there

    alarms = alarms_of(run_survey(nodes))

    assert {(alarm.check, alarm.subject) for alarm in alarms} == {("ports", f"node {NAMES[2]}")}
    assert all("connection refused" in alarm.seen for alarm in alarms)


def test_a_node_that_does_not_answer_is_named_and_the_others_are_examined(
    nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey_module, "FACTS_S", 1.0)
    nodes.hung.add(NAMES[1])

    found = run_survey(nodes)

    (alarm,) = alarms_of(found)
    assert (alarm.check, alarm.subject) == ("nodes", f"node {NAMES[1]}")
    assert {frozenset(pair.nodes) for pair in found.pairs} == {frozenset((NAMES[0], NAMES[2]))}


def test_a_clock_that_is_ahead_is_named(nodes: LocalNodes) -> None:
    nodes.ahead_s[NAMES[2]] = 30.0

    (alarm,) = alarms_of(run_survey(nodes))

    assert (alarm.check, alarm.subject) == ("clock", f"node {NAMES[2]}")
    assert f"30.0 s ahead of that of {NAMES[0]}" in alarm.seen


def test_a_pair_that_is_slow_or_does_not_meet_is_named(nodes: LocalNodes) -> None:
    nodes.bytes_per_s[frozenset(NAMES[:2])] = 1e6
    nodes.unmet.add(frozenset(NAMES[1:]))

    alarms = {alarm.check: alarm for alarm in alarms_of(run_survey(nodes))}

    assert alarms.keys() == {"speed", "collectives"}
    assert alarms["speed"].subject == f"nodes {NAMES[0]} and {NAMES[1]}"
    assert set(alarms["collectives"].subject.split()) >= set(NAMES[1:])


def test_a_port_of_the_engine_that_is_asked_for_is_tried_from_every_other_node(
    nodes: LocalNodes,
) -> None:
    with socket.create_server((NAMES[0], 0)) as free:
        port = int(free.getsockname()[1])
    found = run_survey(nodes, back=f"tcp://{NAMES[0]}:{port}")

    tried = {path.source for path in found.paths if path.address == f"{NAMES[0]}:{port}"}
    assert tried == set(NAMES[1:])
    assert alarms_of(found) == []


def test_pairs_are_left_out_when_time_is_over(nodes: LocalNodes) -> None:
    found = run_survey(nodes, deadline_s=survey_module.MEET_S)  # too little for a round
    assert found.pairs == ()
    assert found.num_pairs_left == 3


@pytest.mark.parametrize("count", range(9))
def test_rounds_hold_each_pair_once_and_nobody_twice_in_a_round(count: int) -> None:
    names = [str(number) for number in range(count)]
    rounds = rounds_of(names)

    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(list, itertools.combinations(names, 2)))
    for pairs in rounds:
        ones = [name for pair in pairs for name in pair]
        assert len(ones) == len(set(ones))


def test_a_round_trip_says_how_far_the_other_clock_is_ahead() -> None:
    echo = Echo("127.0.0.1")
    found = reach("here", Target(node="there", host="127.0.0.1", port=echo.port), 5.0)
    echo.close()

    assert not found.path.problem
    assert abs(found.clock_ahead_s) <= found.path.rtt_s
    assert found.clock_error_s == found.path.rtt_s / 2


# --- what the process that asks the nodes leaves behind --------------------------------------


def test_a_survey_that_was_cut_off_counts_up_to_its_last_whole_line() -> None:
    whole = b'{"rooms":[{"node":"a"}]}\n'
    known, problem = read_survey(whole + b'{"rooms":[{"no', "", None)
    assert [room.node for room in known.rooms] == ["a"]
    assert problem == ""

    scene = scene_of(Asked(num_groups=0, uses_ray=True), make_host(), known, problem)
    (alarm,) = [finding for finding in examine(scene) if finding.level == "fail"]
    assert (alarm.check, alarm.subject) == ("nodes", "node a")
    assert "time was up before its facts came" in alarm.seen


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ("RPC error: InvalidAuthToken: Authentication token is missing", None, "take our token"),
        ("", None, "lets nobody in within the time limit"),
        ("RuntimeError: Version mismatch: the cluster runs Ray 2.59", 1, "Version mismatch"),
        ("", -9, "exit code -9"),
    ],
)
def test_why_ray_lets_nobody_in_is_told(said: str, code: int | None, words: str) -> None:
    known, problem = read_survey(b"", said, code)
    assert words in problem
    scene = scene_of(Asked(uses_ray=True), make_host(), known, problem)
    (alarm,) = [f for f in examine(scene) if f.level == "fail"]
    assert (alarm.check, alarm.subject) == ("ray", "Ray")
