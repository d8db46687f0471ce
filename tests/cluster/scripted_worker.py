"""The main of a worker process whose model is a script: `script.json` in its model folder.

The file maps a rank to fields of `Script`; ranks that it does not name do nothing special, and
only the first epoch goes wrong. Under `facts` it holds what all ranks say of their node.
"""

import json
import sys
from pathlib import Path

from msgspec.structs import replace

from cluster import worker_host
from cluster.backend import WorkerLaunch
from cluster.doctor.alike import node_facts
from cluster.messages.workers import NodeFacts
from cluster.worker_main import main
from tests.cluster.scripted import Script, ScriptedRunner


def build(launch: WorkerLaunch) -> ScriptedRunner:
    path = Path(launch.runner.model_dir) / "script.json"
    scripts = json.loads(path.read_text()) if path.exists() else {}
    fields = scripts.get(str(launch.rank), {}) if launch.epoch == 1 else {}
    return ScriptedRunner(launch, Script(**fields))


def scripted_facts(node: str, model_dir: Path) -> NodeFacts:
    """This node's, but for what the script says under `facts`."""
    path = model_dir / "script.json"
    script = json.loads(path.read_text()) if path.exists() else {}
    return replace(node_facts(node, model_dir), **script.get("facts", {}))


if __name__ == "__main__":
    worker_host.node_facts = scripted_facts
    sys.exit(main(build))
