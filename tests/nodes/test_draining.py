"""A node of two is drained while streams run there: they go on at once on the other one."""

import json
import sys
import time

import pytest

from tests.nodes.ray_nodes import RAY_ENV, Served, served, start_ray
from tests.nodes.rig import HOME, Machine, Network

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model]

STREAMS = """
import json, sys, threading, time
from stoker import Client, SamplingParams
address, key_file, count, length = json.loads(sys.argv[1])
gaps, tokens = [], {}
with Client(address, key_file=key_file) as client:
    def read(number):
        sampling = SamplingParams(
            temperature=0.8 * (number % 2), seed=number, max_tokens=length, ignore_eos=True
        )
        handle = client.submit(f"Story number {number}:", sampling)
        last = None
        for _ in handle:
            now = time.monotonic()
            gaps.append(0.0 if last is None else now - last)
            last = now
        tokens[number] = handle.result().outputs[0].token_ids
    readers = [threading.Thread(target=read, args=(number,)) for number in range(count)]
    for reader in readers:
        reader.start()
    while len(gaps) < 3 * count:
        time.sleep(0.01)
    print("begun", flush=True)
    for reader in readers:
        reader.join()
gaps.sort()
print(json.dumps([[tokens[n] for n in range(count)], gaps[int(0.99 * len(gaps))], gaps[-1]]))
"""
"""A client's program: the tokens of its streams, and the p99 and the longest gap in them."""

NUM_STREAMS, LENGTH = 6, 120


def streams(client: Machine, cluster: Served) -> "tuple[object, str]":
    """Streams that have begun, as a process."""
    asked = json.dumps([cluster.front, f"{HOME}/key", NUM_STREAMS, LENGTH])
    process = client.start([sys.executable, "-c", STREAMS, asked])
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end_of(process: object) -> list[object]:
    """What they brought."""
    printed, _ = process.communicate(timeout=300)  # type: ignore[attr-defined]
    return list(json.loads(printed.splitlines()[-1]))


def stoker(machine: Machine, cluster: Served, *words: str) -> str:
    where = [f"--address={cluster.front}", f"--key-file={HOME}/key", "--timeout=30"]
    return machine.run(["stoker", *words, *where], timeout_s=240.0).stdout


def hosts(machine: Machine, cluster: Served) -> list[str]:
    """Of the ranks that serve, by group."""
    (one,) = json.loads(stoker(machine, cluster, "status", "--json")).values()
    groups = [group for group in one["groups"] if group["state"] == "ready"]
    return [rank["host"] for group in groups for rank in group["ranks"]]


def test_streams_of_a_drained_node_go_on_at_once_and_whole_on_the_other_one() -> None:
    with Network(2) as network:
        head, worker = network.machines
        start_ray(network.machines, num_cpus=1, env=RAY_ENV)
        options = ("--address=auto", "--groups=2", "--room-timeout-s=1", "--drain-s=600")
        with served(head, *options, env=RAY_ENV) as cluster:
            assert sorted(hosts(head, cluster)) == sorted([head.name, worker.name])
            undisturbed = end_of(streams(head, cluster)[0])

            process, word = streams(head, cluster)
            assert word == "begun"
            began = time.monotonic()
            said = stoker(head, cluster, "drain", worker.name)
            took_s = time.monotonic() - began
            found = end_of(process)
            print(
                f"drained in {took_s:.1f} s; gaps p99 {float(str(found[1])) * 1e3:.0f} ms, longest "
                f"{float(str(found[2])) * 1e3:.0f} ms; undisturbed p99 "
                f"{float(str(undisturbed[1])) * 1e3:.0f} ms"
            )
            assert "is empty" in said
            assert found[0] == undisturbed[0]
            assert set(hosts(head, cluster)) == {head.name}

            stoker(head, cluster, "drain", worker.name, "--undo")
            deadline = time.monotonic() + 240.0
            while worker.name not in hosts(head, cluster):
                assert time.monotonic() < deadline, "the group has not come back"
                time.sleep(1.0)
