"""A Ray cluster over machines of the rig, and Stoker served from it."""

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.nodes.rig import HOME, ROOT, Machine, interrupt

RAY_PORT = 6379
TOKEN = f"{HOME}/ray_token"
RAY_ENV = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN_PATH": TOKEN,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",  # of a busy machine
}
RAY_OPTIONS = ("--object-store-memory=83886080", "--disable-usage-stats")
MODELS = ROOT / "models"
START_S = 120.0

ASK = """
import json, sys
from stoker import Client, SamplingParams
address, key_file, prompts = json.loads(sys.argv[1])
with Client(address, key_file=key_file) as client:
    asked = [
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=1),
        SamplingParams(temperature=0.8, seed=7, max_tokens=12, logprobs=1),
    ]
    outputs = [out for sampling in asked for out in client.generate(prompts, sampling)]
print(json.dumps([
    [only.token_ids, [row[token].logprob for row, token in zip(only.logprobs, only.token_ids)]]
    for out in outputs for only in out.outputs
]))
"""
"""A client's program: the tokens and log-probabilities of every prompt, greedy and sampled."""


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster that takes requests."""

    front: str
    http: str
    process: "subprocess.Popen[str]"
    log: str
    """Path of its log, as seen from outside."""

    def events(self, name: str) -> list[str]:
        """Lines of the log with this event."""
        with open(self.log, encoding="utf-8") as file:
            return [line for line in file if f" {name} " in line]


def start_ray(
    machines: Sequence[Machine],
    *,
    num_cpus: int,
    env: dict[str, str],
    addresses: Sequence[str] = (),
    own_env: Sequence[dict[str, str]] = (),
) -> None:
    """Start Ray with its head on the first machine. It ends with the machines.

    Args:
        addresses: of each machine, where Ray is to know it; default: its first.
        own_env: variables of each machine alone.
    """
    addresses = addresses or [machine.address for machine in machines]
    head_address = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
    joins = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
    token = secrets.token_hex(32)
    for machine in machines:
        (machine.home / "ray_token").write_text(token)
        (machine.home / "ray_token").chmod(0o600)
    options = [f"--num-cpus={num_cpus}", *RAY_OPTIONS]
    for number, machine in enumerate(machines):
        at = f"--node-ip-address={addresses[number]}"
        own = own_env[number] if own_env else {}
        command = ["ray", "start", *joins, at, *options]
        machine.run(command, env={**env, **own}, timeout_s=START_S)
        joins = [f"--address={head_address}:{RAY_PORT}"]


@contextmanager
def served(machine: Machine, *options: str, env: dict[str, str]) -> Iterator[Served]:
    """`stoker serve` on a machine, up; ended in order afterwards, which must leave nothing."""
    command = ["stoker", "serve", f"--models-dir={MODELS}", f"--host={machine.address}"]
    command += [f"--front-address=tcp://{machine.address}:0", f"--key-file={HOME}/key"]
    command += ["--api-key=sesame", "--max-model-len=512", "--num-kv-blocks=256", *options]
    log = machine.home / f"serve-{secrets.token_hex(4)}.log"
    with log.open("w", encoding="utf-8") as file:
        process = machine.start(command, env=env, stderr=file.fileno())
    assert process.stdout is not None
    try:
        front, http = process.stdout.readline().strip(), process.stdout.readline().strip()
        assert http, f"stoker serve did not come up:\n{log.read_text()}"
        yield Served(front, http, process, str(log))
        interrupt(process, signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            interrupt(process, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def answers(client: Machine, server: Machine, cluster: Served, prompts: Sequence[str]) -> object:
    """What a client on a machine of its own gets, with the key file that it was given."""
    (client.home / "key").write_bytes((server.home / "key").read_bytes())
    (client.home / "key").chmod(0o600)
    asked = json.dumps([cluster.front, f"{HOME}/key", list(prompts)])
    done = client.run([sys.executable, "-c", ASK, asked], timeout_s=START_S)
    return json.loads(done.stdout.splitlines()[-1])
