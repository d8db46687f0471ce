"""`stoker status`: how running clusters are."""

import argparse
import sys

import msgspec

from cluster.frontend.errors import RequestError
from cluster.messages.reports import GroupStatus, Status
from stoker.cli import EXIT_FAILED, EXIT_OK
from stoker.client import Client
from stoker.running import running_clusters


def status(arguments: argparse.Namespace) -> int:
    """Ask the cluster at `--address`, or each one of this user; fails if one does not answer."""
    running = {cluster.address: cluster for cluster in running_clusters()}
    addresses = [arguments.address] if arguments.address else list(running)
    if not addresses:
        print(
            "stoker: no running cluster was found for this user; start one with `stoker serve`, "
            "or name one with --address",
            file=sys.stderr,
        )
        return EXIT_FAILED
    found: dict[str, Status] = {}
    for address in addresses:
        try:
            with Client(address, label="status", key_file=arguments.key_file) as client:
                found[address] = client.status(arguments.timeout)
        except RequestError as error:
            print(f"stoker: error: {error}", file=sys.stderr)
    if arguments.json:
        print(msgspec.json.encode(found).decode())
    else:
        for address, answer in found.items():
            http = running[address].http_address if address in running else ""
            print_status(address, answer, http)
    return EXIT_OK if len(found) == len(addresses) else EXIT_FAILED


def print_status(address: str, status: Status, http_address: str = "") -> None:
    """One cluster as a few lines and two tables."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{address}: {status.model}, {status.state} for {_duration(status.uptime_s)}")
    console.print(
        f"running {status.num_running}, waiting {status.num_waiting}, clients {status.num_clients}"
    )
    if http_address:
        console.print(f"HTTP at {http_address}")
    if status.num_engine_restarts:
        console.print(
            f"the engine was restarted {status.num_engine_restarts} times; the process before "
            f"this one ended: {status.last_engine_loss}"
        )
    columns = ("group", "epoch", "state", "restarts", "running", "blocks", "cached", "steps/s")
    groups = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # fits into 80 characters
    columns = ("rank", "stage", "state", "node", "pid", "device", "blocks", "weights")
    ranks = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for group in status.groups:
        groups.add_row(*_group_row(group))
        for rank in group.ranks:
            ranks.add_row(
                f"{group.group}.{rank.rank}",
                str(rank.stage),
                rank.state,
                rank.host,
                str(rank.pid),
                rank.device,
                str(rank.num_blocks),
                f"{rank.weight_bytes / 2**20:.0f} MiB",
            )
    console.print(groups)
    console.print(ranks)
    for group in status.groups:
        if group.message:
            console.print(f"group {group.group} was lost last because: {group.message}")
    totals = status.totals
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(totals.finished.items()))
    console.print(
        f"since start: {_of(totals.num_requests, 'request')} ({ended or 'none ended'}), "
        f"{totals.num_rejected} refused, {totals.prompt_tokens} prompt tokens "
        f"({totals.cached_tokens} from cache), {totals.output_tokens} output tokens, "
        f"{totals.num_steps} steps ({totals.num_mixed_steps} mixed), "
        f"{totals.num_preemptions} preemptions"
    )


def _group_row(group: GroupStatus) -> list[str]:
    return [
        str(group.group),
        str(group.epoch),
        group.state,
        str(group.num_restarts),
        str(group.num_running),
        f"{group.num_used_blocks} of {group.num_blocks}",
        str(group.num_cached_blocks),
        f"{group.steps_per_s:.1f}",
    ]


def _of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
