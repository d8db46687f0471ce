"""The catalogue of faults over facts: each names its culprit, and nobody else is accused.

Faults that are really there, in files, limits, ports and nodes, are in the files beside this one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from cluster.doctor.checks import CHECKS, examine, table
from cluster.doctor.model_facts import model_facts
from cluster.doctor.scene import Asked, Interface, Level, Pair, Scene
from tests.cluster.doctor.scenes import (
    GIB,
    alarms,
    make_host,
    make_pairs,
    make_room,
    make_scene,
    make_ways,
    write_model,
)

N1, N2, N3 = (make_host(number) for number in (1, 2, 3))
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is spoilt, and what must be said of it."""

    scene: Scene
    check: str
    subject: str
    says: tuple[str, ...]
    level: Level = "fail"


def with_second(**changes: object) -> Scene:
    """Three nodes, of which the second is spoilt."""
    return make_scene(N1, replace(N2, **changes), N3)


def spoilt_way() -> Scene:
    ways = make_ways(N1, N2, N3)
    blocked = replace(ways[2], problem="no answer in 2 s")  # from the second to the first
    return make_scene(paths=(*ways[:2], blocked, *ways[3:]))


def spoilt_pair(**changes: object) -> Scene:
    """The pair of the second and the third node."""
    pairs = make_pairs(N1, N2, N3)
    return make_scene(pairs=(*pairs[:2], replace(pairs[2], **changes)))


FAULTS = {
    "another interface routes to the others": Fault(
        scene=with_second(address_outward="192.168.7.2"),
        check="routes",
        subject="node 10.0.0.2, interface eth1",
        says=("192.168.7.2", "10.0.0.2 (eth0)", "--node-ip-address 192.168.7.2"),
    ),
    "the head is known by an interface that does not route": Fault(
        scene=make_scene(replace(N1, address_outward="192.168.7.1"), N2, N3),
        check="routes",
        subject="node 10.0.0.1, interface eth1",
        says=("--node-ip-address 192.168.7.1",),
    ),
    "no route to the others": Fault(
        scene=with_second(address_outward=""),
        check="routes",
        subject="node 10.0.0.2",
        says=("no route to 10.0.0.1",),
    ),
    "an address that no interface has": Fault(
        scene=with_second(
            interfaces=(Interface(name="eth0", addresses=("10.0.0.77",)),),
        ),
        check="addresses",
        subject="node 10.0.0.2",
        says=("none of its interfaces has", "10.0.0.77"),
    ),
    "an interface that is down": Fault(
        scene=with_second(
            interfaces=(Interface(name="eth0", addresses=("10.0.0.2",), is_up=False),),
        ),
        check="addresses",
        subject="node 10.0.0.2, interface eth0",
        says=("is down",),
    ),
    "a host name that resolves to loopback": Fault(
        scene=with_second(name_resolves_to=("127.0.1.1",)),
        check="host names",
        subject="node 10.0.0.2, interface lo",
        says=("n2", "127.0.1.1", "/etc/hosts"),
        level="warn",
    ),
    "a blocked port": Fault(
        scene=spoilt_way(),
        check="ports",
        subject="node 10.0.0.1",
        says=("10.0.0.2 cannot connect to 10.0.0.1:4000", "firewall"),
    ),
    "ranks that do not meet": Fault(
        scene=spoilt_pair(problem="MeetingFailed: rank 1 did not reach rank 0"),
        check="collectives",
        subject="nodes 10.0.0.2 and 10.0.0.3",
        says=("gloo", "did not reach rank 0"),
    ),
    "a link slower than any should be": Fault(
        scene=make_scene(N1, N2, pairs=(replace(make_pairs(N1, N2)[0], bytes_per_s=1.2e6),)),
        check="speed",
        subject="nodes 10.0.0.1 and 10.0.0.2",
        says=("1.2 MB/s", "wanted 20 MB/s"),
        level="warn",
    ),
    "a link slower than the others": Fault(
        scene=spoilt_pair(bytes_per_s=110e6),
        check="speed",
        subject="nodes 10.0.0.2 and 10.0.0.3",
        says=("110.0 MB/s", "median is 1000 MB/s"),
        level="warn",
    ),
    "a stopped process": Fault(
        scene=make_scene(
            N1,
            N3,
            rooms=(make_room(N1), make_room(N2), make_room(N3)),
            silent={"10.0.0.2": "asked for its facts: no answer within 6.0 s"},
        ),
        check="nodes",
        subject="node 10.0.0.2",
        says=("did not answer in time",),
    ),
    "a dead node": Fault(
        scene=make_scene(
            N1, N3, rooms=(make_room(N1), make_room(N2, is_alive=False), make_room(N3))
        ),
        check="nodes",
        subject="node 10.0.0.2",
        says=("counts it as dead",),
    ),
    "another Python": Fault(
        scene=with_second(python="3.12.1"),
        check="versions",
        subject="node 10.0.0.2",
        says=("Python 3.12.1", "10.0.0.1 has 3.11.7"),
    ),
    "another Ray": Fault(
        scene=with_second(ray="2.59.1"),
        check="versions",
        subject="node 10.0.0.2",
        says=("Ray 2.59.1", "2.60.0"),
    ),
    "another torch": Fault(
        scene=with_second(torch="2.12.0+cpu"),
        check="versions",
        subject="node 10.0.0.2",
        says=("torch 2.12.0+cpu", "2.13.0+cpu"),
    ),
    "another Stoker": Fault(
        scene=with_second(stoker="0.0.9"),
        check="versions",
        subject="node 10.0.0.2",
        says=("Stoker 0.0.9", "0.1.0"),
    ),
    "no torch": Fault(
        scene=make_scene(replace(N1, torch="")),
        check="versions",
        subject="node 10.0.0.1",
        says=("torch is not installed", "pip install torch"),
    ),
    "libraries that were not built": Fault(
        scene=with_second(missing_libraries=("worker/ops/native/kernels",)),
        check="versions",
        subject="node 10.0.0.2",
        says=("worker/ops/native/kernels", "make setup"),
    ),
    "another model": Fault(
        scene=with_second(model=replace(N2.model, digest="cd34")),
        check="model",
        subject="node 10.0.0.2",
        says=("cd34", "10.0.0.1 has ab12"),
    ),
    "too little memory for so many ranks": Fault(
        scene=make_scene(
            N1,
            replace(N2, memory_free_bytes=GIB // 2),
            asked=Asked(num_groups=2, num_ranks=2, uses_ray=True),
        ),
        check="memory",
        subject="node 10.0.0.2",
        says=("2 ranks need 1.6 GiB", "512 MiB are free"),
    ),
    "too little memory for what ranks share": Fault(
        scene=make_scene(
            replace(N1, memory_free_bytes=GIB // 2, model=replace(N1.model, weight_bytes=2 * GIB)),
            asked=Asked(num_groups=4, num_ranks=1, shares_weights=True),
            rooms=(),
        ),
        check="memory",
        subject="node 10.0.0.1",
        says=("4 ranks need 3.2 GiB", "512 MiB are free"),
    ),
    "a small /dev/shm for GPUs": Fault(
        scene=make_scene(
            replace(N1, num_gpus=4, driver="570.1", shm_bytes=64 * MIB, shm_free_bytes=64 * MIB),
            asked=Asked(num_ranks=4, device="cuda"),
            rooms=(),
        ),
        check="shared memory",
        subject="node 10.0.0.1",
        says=("64 MiB", "--shm-size"),
    ),
    "a small /dev/shm for Ray": Fault(
        scene=with_second(shm_bytes=64 * MIB, shm_free_bytes=60 * MIB),
        check="shared memory",
        subject="node 10.0.0.2",
        says=("60 MiB", "--shm-size"),
        level="warn",
    ),
    "few open files": Fault(
        scene=with_second(open_files=1024),
        check="limits",
        subject="node 10.0.0.2",
        says=("1024 files", "ulimit -n"),
        level="warn",
    ),
    "few processes": Fault(
        scene=with_second(processes=128),
        check="limits",
        subject="node 10.0.0.2",
        says=("128 processes", "ulimit -u"),
    ),
    "a full disk": Fault(
        scene=with_second(disk_free_by_path={"/tmp": 10 * MIB}),
        check="disk",
        subject="node 10.0.0.2",
        says=("/tmp has 10 MiB free",),
    ),
    "no GPU": Fault(
        scene=make_scene(
            replace(N1, num_gpus=1, driver="570.1"),
            N2,
            asked=Asked(num_ranks=1, device="cuda"),
            rooms=(),
        ),
        check="devices",
        subject="node 10.0.0.2",
        says=("no GPU",),
    ),
    "another driver": Fault(
        scene=make_scene(
            replace(N1, num_gpus=1, driver="570.1"),
            replace(N2, num_gpus=1, driver="550.9"),
            asked=Asked(num_ranks=1, device="cuda"),
            rooms=(),
        ),
        check="devices",
        subject="node 10.0.0.2",
        says=("550.9", "570.1"),
        level="warn",
    ),
    "too few devices": Fault(
        scene=make_scene(N1, N2, asked=Asked(num_groups=3, num_ranks=6, uses_ray=True)),
        check="placement",
        subject="placement",
        says=("asked for 18 CPUs", "16 of 16 are free", "10.0.0.2 8 of 8"),
    ),
    "clock skew": Fault(
        scene=with_second(clock_ahead_s=-7.5),
        check="clock",
        subject="node 10.0.0.2",
        says=("7.5 s behind that of 10.0.0.1",),
        level="warn",
    ),
    "a stale Ray": Fault(
        scene=make_scene(replace(N1, stale_ray=("raylet (pid 7) whose head is gone",)), N2),
        check="stale Ray",
        subject="node 10.0.0.1",
        says=("raylet (pid 7)", "ray stop"),
        level="warn",
    ),
    "a wrong token": Fault(
        scene=make_scene(N1, rooms=(), ray_problem="Ray does not take our token | give it"),
        check="ray",
        subject="Ray",
        says=("does not take our token", "give it"),
    ),
    "NCCL's syntax in gloo's variable": Fault(
        scene=with_second(variables={"GLOO_SOCKET_IFNAME": "^lo"}),
        check="variables",
        subject="node 10.0.0.2, variable GLOO_SOCKET_IFNAME",
        says=("'^lo'", "unset GLOO_SOCKET_IFNAME"),
    ),
    "a variable that names no interface": Fault(
        scene=with_second(variables={"NCCL_SOCKET_IFNAME": "ib0"}),
        check="variables",
        subject="node 10.0.0.2, variable NCCL_SOCKET_IFNAME",
        says=("ib0", "eth0, eth1, lo"),
    ),
    "an address of another host for the engine": Fault(
        scene=make_scene(
            replace(N1, taken_addresses=("tcp://10.9.9.9:7000: no such address",)), N2
        ),
        check="sockets",
        subject="node 10.0.0.1",
        says=("tcp://10.9.9.9:7000", "back_address"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_culprit_and_nobody_else_is_accused(name: str) -> None:
    fault = FAULTS[name]

    (alarm,) = alarms(fault.scene)

    assert (alarm.check, alarm.level, alarm.subject) == (fault.check, fault.level, fault.subject)
    for words in fault.says:
        assert words in f"{alarm.seen} {alarm.fix}"
    assert alarm.fix


def healthy_scenes() -> dict[str, Scene]:
    """Clusters that differ in all that may differ."""
    many = tuple(make_host(number) for number in range(1, 9))
    gpus = tuple(make_host(n, num_gpus=8, driver="570.1") for n in (1, 2))
    alone = make_host(1, name_resolves_to=("127.0.1.1",), address="", address_outward="")
    return {
        "one host, named after its loopback as Debian does": make_scene(
            alone, asked=Asked(num_ranks=2), rooms=()
        ),
        "one host without a name": make_scene(replace(alone, name_resolves_to=()), rooms=()),
        "one host that is a Ray cluster": make_scene(make_host(1, address_outward="127.0.0.1")),
        "two nodes": make_scene(N1, N2),
        "three nodes": make_scene(),
        "eight nodes": make_scene(*many),
        "nodes without names": make_scene(*(replace(n, name_resolves_to=()) for n in (N1, N2))),
        "no limits at all": make_scene(*(replace(n, open_files=None) for n in (N1, N2))),
        "limits of a service": make_scene(*(replace(n, processes=4096) for n in (N1, N2))),
        "builds of torch for CPUs and GPUs": make_scene(N1, replace(N2, torch="2.13.0+cu130")),
        "patch releases of Python": make_scene(N1, replace(N2, python="3.11.9")),
        "no model yet": make_scene(*(replace(n, model=None) for n in (N1, N2))),
        "gigabit links": make_scene(
            pairs=tuple(replace(p, bytes_per_s=100e6) for p in make_pairs(N1, N2, N3))
        ),
        "a link half as fast as the others": spoilt_pair(bytes_per_s=5e8),
        "a busy machine": make_scene(
            pairs=tuple(replace(p, latency_s=0.02) for p in make_pairs(N1, N2, N3))
        ),
        "clocks half a second apart": make_scene(N1, replace(N2, clock_ahead_s=0.5)),
        "a clock that a slow way hides": make_scene(
            N1, replace(N2, clock_ahead_s=2.0, clock_error_s=1.5)
        ),
        "GPUs": make_scene(*gpus, asked=Asked(num_groups=2, num_ranks=8, device="cuda"), rooms=()),
        "GPUs in a small container, one rank": make_scene(
            make_host(1, num_gpus=1, driver="570.1", shm_free_bytes=64 * MIB),
            asked=Asked(num_ranks=1, device="cuda"),
            rooms=(),
        ),
        "a small container without Ray": make_scene(
            replace(alone, shm_free_bytes=64 * MIB), asked=Asked(num_ranks=2), rooms=()
        ),
        "variables that name interfaces": make_scene(
            N1,
            replace(
                N2, variables={"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^lo,docker"}
            ),
        ),
        "a prefix for NCCL": make_scene(N1, replace(N2, variables={"NCCL_SOCKET_IFNAME": "eth"})),
        "narrow weights of a wide file": make_scene(
            N1,
            replace(N2, memory_free_bytes=GIB),
            asked=Asked(num_ranks=2, bytes_per_weight=1.0, uses_ray=True),
        ),
        "IPv6": make_scene(
            *(
                make_host(
                    n,
                    node=f"fd00::{n}",
                    address=f"fd00::{n}",
                    address_outward=f"fd00::{n}",
                    interfaces=(Interface(name="eth0", addresses=(f"fd00::{n}",)),),
                )
                for n in (1, 2)
            )
        ),
    }


@pytest.mark.parametrize("name", healthy_scenes())
def test_a_healthy_cluster_raises_no_alarm(name: str) -> None:
    assert alarms(healthy_scenes()[name]) == []


def test_the_catalogue_spoils_what_every_check_looks_at() -> None:
    assert {fault.check for fault in FAULTS.values()} == {check.name for check in CHECKS}
    assert len(FAULTS) >= 25
    assert len(healthy_scenes()) >= 20


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "missing"),
        (lambda folder: truncate(folder / "model-00001-of-00002.safetensors"), "header speaks of"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "index"),
        (lambda folder: empty(folder / "model-00002-of-00002.safetensors"), "not a safetensors"),
    ],
    ids=["missing shard", "truncated shard", "no config", "damaged index", "empty shard"],
)
def test_a_checkpoint_that_is_not_whole_on_one_node_is_named_with_the_file(
    tmp_path: Path, spoil: Callable[[Path], object], says: str
) -> None:
    folder = write_model(tmp_path / "model")
    good = model_facts(folder)
    assert not good.problem
    spoil(folder)

    (alarm,) = alarms(make_scene(replace(N1, model=good), replace(N2, model=model_facts(folder))))

    assert (alarm.check, alarm.subject) == ("model", "node 10.0.0.2")
    assert says in alarm.seen
    assert str(folder) in alarm.seen


def truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(10_000)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def test_other_weights_of_the_same_shapes_have_another_digest(tmp_path: Path) -> None:
    one, other = write_model(tmp_path / "a"), write_model(tmp_path / "b", fill=1)
    same = write_model(tmp_path / "c")

    assert model_facts(one).digest == model_facts(same).digest != model_facts(other).digest
    assert model_facts(one).weight_bytes == 2 * 16384
    assert model_facts(one).bytes_per_weight == 4


def test_a_line_has_level_check_culprit_what_was_seen_and_the_fix() -> None:
    lines = table(examine(with_second(torch="2.12.0+cpu"))).splitlines()

    assert any(line.startswith("OK    ray ") for line in lines)
    (line,) = [line for line in lines if line.startswith("FAIL")]
    assert "versions" in line
    assert "node 10.0.0.2: has torch 2.12.0+cpu, but 10.0.0.1 has 2.13.0+cpu. Fix: " in line


def test_two_faults_at_once_are_both_named() -> None:
    scene = make_scene(
        N1,
        replace(N2, ray="2.59.1"),
        replace(N3, disk_free_by_path={"/tmp": 0}),
        pairs=(Pair(nodes=("10.0.0.1", "10.0.0.2"), problem="no"),),
    )
    assert {(a.check, a.subject) for a in alarms(scene)} == {
        ("versions", "node 10.0.0.2"),
        ("disk", "node 10.0.0.3"),
        ("collectives", "nodes 10.0.0.1 and 10.0.0.2"),
    }
