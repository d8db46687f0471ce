"""The main of a cluster's process whose workers are `scripted_worker` processes."""

import secrets
import sys
from pathlib import Path

from cluster.backend import Report
from cluster.engine_config import EngineConfig
from cluster.launch_plan import LaunchPlan
from cluster.links.sockets import fresh_keys
from cluster.local_backend import LocalBackend
from cluster.logs import EventLog
from cluster.supervisor_main import main


def make_plan(config: EngineConfig, log: EventLog) -> LaunchPlan:
    return LaunchPlan(
        config=config.resolved(has_gpu=False),
        model="scripted",
        model_dir=Path(config.model or "/nowhere"),
        engine_id=secrets.token_hex(4),
        key=secrets.token_hex(8),
        cores=(),
        front_keys=fresh_keys() if config.encrypt else None,
        back_keys=fresh_keys() if config.encrypt else None,
    )


def make_backend(plan: LaunchPlan, report: Report, log: EventLog) -> LocalBackend:
    program = plan.model_dir / "worker.py"  # a test may bring its own
    command = [sys.executable, str(program)]
    if not program.exists():
        command = [sys.executable, "-m", "tests.cluster.scripted_worker"]
    return LocalBackend(report, num_ranks=plan.config.num_ranks, cores=(), log=log, command=command)


if __name__ == "__main__":
    sys.exit(main(make_plan, make_backend))
