"""The main of a worker process whose model is a script: `script.json` in its model folder.

The file maps a rank to fields of `Script`; ranks that it does not name do nothing special, and
only the first epoch goes wrong.
"""

import json
import sys
from pathlib import Path

from cluster.backend import WorkerLaunch
from cluster.worker_main import main
from tests.cluster.scripted import Script, ScriptedRunner


def build(launch: WorkerLaunch) -> ScriptedRunner:
    path = Path(launch.runner.model_dir) / "script.json"
    scripts = json.loads(path.read_text()) if path.exists() else {}
    fields = scripts.get(str(launch.rank), {}) if launch.epoch == 1 else {}
    return ScriptedRunner(launch, Script(**fields))


if __name__ == "__main__":
    sys.exit(main(build))
