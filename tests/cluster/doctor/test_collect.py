"""What a host says of itself, with faults that are really there."""

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.doctor import collect
from cluster.doctor.alike import node_facts, why_not_alike
from cluster.doctor.collect import (
    Question,
    address_towards,
    collect_host,
    resolve,
    stale_ray,
    why_not_bound,
)
from cluster.doctor.scene import Asked, Scene
from cluster.messages.workers import NodeFacts
from tests.cluster.doctor.scenes import alarms, write_model

HERE = Question(node="here")


def scene_of(question: Question, asked: Asked | None = None) -> Scene:
    host = collect_host(question)
    return Scene(asked=asked or Asked(num_ranks=1), here=host, hosts=(host,))


@pytest.fixture
def few_files() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    yield 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def test_this_machine_knows_itself(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    host = collect_host(Question(node="here", model_dir=str(model), disk_paths=(str(tmp_path),)))

    assert host.name == socket.gethostname()
    assert host.python
    assert host.torch
    assert host.ray
    assert host.stoker
    assert host.missing_libraries == ()
    assert host.model is not None
    assert host.model.digest
    assert "127.0.0.1" in {a for i in host.interfaces for a in i.addresses}
    assert 0 < host.memory_free_bytes <= host.memory_bytes
    assert 0 < host.shm_free_bytes <= host.shm_bytes
    assert host.disk_free_by_path[str(tmp_path)] > 0
    assert host.num_cores == len(os.sched_getaffinity(0))


def test_few_open_files_are_named(few_files: int) -> None:
    (alarm,) = alarms(scene_of(HERE))
    assert (alarm.check, alarm.subject, alarm.level) == ("limits", "node here", "fail")
    assert "500 files" in alarm.seen


def test_a_taken_port_is_named(port: int) -> None:
    question = Question(node="here", own_sockets=(f"tcp://127.0.0.1:{port}",))
    (alarm,) = alarms(scene_of(question))
    assert (alarm.check, alarm.subject) == ("sockets", "node here")
    assert f"127.0.0.1:{port}" in alarm.seen
    assert "in use" in alarm.seen


def test_an_address_of_another_host_cannot_be_listened_at() -> None:
    assert "assign" in why_not_bound("tcp://203.0.113.7:0")
    assert not why_not_bound("tcp://127.0.0.1:0")
    assert not why_not_bound("ipc:///tmp/any")


def test_a_small_shm_is_named_with_the_flag_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SmallDisk:
        total, free = 1 << 20, 1 << 19

    monkeypatch.setattr(collect.shutil, "disk_usage", lambda path: SmallDisk)
    found = alarms(scene_of(HERE, Asked(num_ranks=2, uses_ray=True)))
    (alarm,) = [finding for finding in found if finding.check != "ray"]

    assert (alarm.check, alarm.subject) == ("shared memory", "node here")
    assert "--shm-size" in alarm.fix


def test_the_file_of_a_ray_that_is_gone_is_named(tmp_path: Path, port: int) -> None:
    current = tmp_path / "ray_current_cluster"
    assert stale_ray(current) == stale_ray(tmp_path / "none")
    current.write_text(f"127.0.0.1:{port}")
    assert stale_ray(current) == stale_ray(tmp_path / "none")
    current.write_text("127.0.0.1:1")
    assert f"{current} names 127.0.0.1:1, where nobody answers" in stale_ray(current)


def test_a_name_that_nobody_knows_resolves_to_nothing_within_the_limit() -> None:
    assert resolve("no-such-host.invalid", timeout_s=1.0) == ()
    assert "127.0.0.1" in resolve("localhost")


def test_the_way_to_loopback_is_by_loopback() -> None:
    assert address_towards("127.0.0.5") == "127.0.0.1"
    assert address_towards("") == ""


# --- what must be alike ----------------------------------------------------------------------


def test_equal_nodes_are_alike_and_builds_of_one_torch_too(tmp_path: Path) -> None:
    ours = node_facts("n1", write_model(tmp_path / "model"))
    theirs = NodeFacts(
        node="n2",
        python=ours.python,
        ray=ours.ray,
        torch=ours.torch.partition("+")[0] + "+cu130",
        stoker=ours.stoker,
        model_digest=ours.model_digest,
    )
    assert why_not_alike(theirs, ours) == ""


def test_another_version_is_refused_with_the_node_and_both_versions() -> None:
    ours = NodeFacts(node="n1", python="3.11.7", ray="2.60.0", torch="2.13.0", stoker="0.1.0")
    theirs = NodeFacts(node="n2", python="3.11.7", ray="2.60.0", torch="2.12.1", stoker="0.1.0")

    why = why_not_alike(theirs, ours)

    assert why.startswith("node n2 has torch 2.12.1, but n1 has 2.13.0. Fix: ")


def test_another_model_or_none_is_refused_by_node_but_not_where_the_leader_has_none() -> None:
    ours = NodeFacts(node="n1", model_digest="ab12")
    assert "digest cd34, but n1 has ab12" in why_not_alike(
        NodeFacts(node="n2", model_digest="cd34"), ours
    )
    missing = NodeFacts(node="n2", model_problem="/m has no config.json on this node")
    assert "node n2 /m has no config.json" in why_not_alike(missing, ours)
    assert why_not_alike(missing, NodeFacts(node="n1", model_problem="none here either")) == ""
