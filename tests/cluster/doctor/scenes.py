"""Builders of healthy facts, which a test spoils in one place."""

import json
import struct
from pathlib import Path

from msgspec.structs import replace

from cluster.doctor.checks import examine
from cluster.doctor.scene import (
    Asked,
    Finding,
    Host,
    Interface,
    ModelFacts,
    Pair,
    Room,
    Scene,
)
from cluster.doctor.scene import Path as Way

GIB = 1 << 30


def make_host(number: int = 1, **changes: object) -> Host:
    """Node 10.0.0.`number`: large, whole, and alone with its name."""
    address = f"10.0.0.{number}"
    host = Host(
        node=address,
        name=f"n{number}",
        address=address,
        python="3.11.7",
        ray="2.60.0",
        torch="2.13.0+cpu",
        stoker="0.1.0",
        model=ModelFacts(digest="ab12", weight_bytes=GIB, bytes_per_weight=4),
        interfaces=(
            Interface(name="eth0", addresses=(address,)),
            Interface(name="eth1", addresses=(f"192.168.7.{number}",)),
            Interface(name="lo", addresses=("127.0.0.1", "::1")),
        ),
        name_resolves_to=(address,),
        address_outward=address,
        shm_bytes=8 * GIB,
        shm_free_bytes=8 * GIB,
        open_files=65536,
        memory_bytes=64 * GIB,
        memory_free_bytes=32 * GIB,
        disk_free_by_path={"/tmp": 100 * GIB},
        num_cores=8,
        clock_ahead_s=0.0 if number > 1 else None,
    )
    return replace(host, **changes)


def make_room(host: Host, **changes: object) -> Room:
    room = Room(node=host.node, address=host.address, cpus=8, free_cpus=8)
    return replace(room, **changes)


def make_ways(*hosts: Host) -> tuple[Way, ...]:
    return tuple(
        Way(source=a.node, target=b.node, address=f"{b.address}:4000", rtt_s=0.0003)
        for a in hosts
        for b in hosts
        if a is not b
    )


def make_pairs(*hosts: Host) -> tuple[Pair, ...]:
    return tuple(
        Pair(nodes=(a.node, b.node), latency_s=0.001, bytes_per_s=1e9)
        for number, a in enumerate(hosts)
        for b in hosts[number + 1 :]
    )


def make_scene(*hosts: Host, asked: Asked | None = None, **changes: object) -> Scene:
    """A healthy Ray cluster of these hosts, all of whose ways and pairs are good."""
    given = hosts or (make_host(1), make_host(2), make_host(3))
    fields: dict[str, object] = {
        "asked": asked or Asked(num_groups=1, num_ranks=2, uses_ray=True),
        "here": given[0],
        "hosts": given,
        "rooms": tuple(make_room(host) for host in given),
        "paths": make_ways(*given),
        "pairs": make_pairs(*given),
        **changes,
    }
    return Scene(**fields)  # type: ignore[arg-type]


def alarms(scene: Scene) -> list[Finding]:
    """What is not well."""
    return [finding for finding in examine(scene) if finding.level != "ok"]


def write_model(folder: Path, *, num_shards: int = 2, fill: int = 0) -> Path:
    """A checkpoint of some kilobytes in the real format."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    weight_map = {}
    for shard in range(1, num_shards + 1):
        name = f"model-{shard:05}-of-{num_shards:05}.safetensors"
        entries = {f"t{shard}": {"dtype": "F32", "shape": [4096], "data_offsets": [0, 16384]}}
        header = json.dumps(entries).encode()
        data = struct.pack("<Q", len(header)) + header + bytes([fill]) * 16384
        (folder / name).write_bytes(data)
        weight_map[f"t{shard}"] = name
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
