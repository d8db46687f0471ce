"""Files for `ray up`, checked as `ray up` checks them, without a machine."""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.launcher.cluster_file import read_cluster_file
from cluster.launcher.ray_file import HEAD_ENVIRONMENT, NOT_SOURCE, ray_file
from scheduler.errors import ConfigError
from tests.nodes.rig import ROOT

DEPLOY = ROOT / "deploy"
SHIPPED = sorted(DEPLOY.glob("ray-cluster*.yaml"))


def prepared(text: str) -> dict[str, object]:
    found: dict[str, object] = prepare_config(yaml.safe_load(text))
    validate_config(found)
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_case_114_ray_accepts_the_files_that_we_ship(path: Path) -> None:
    found = prepared(path.read_text(encoding="utf-8"))

    assert found["cluster_name"] == "stoker"
    commands = "\n".join([*found["head_start_ray_commands"], *found["worker_start_ray_commands"]])
    assert commands.count("RAY_AUTH_MODE=token") == 2
    assert "RAY_health_check_failure_threshold" in commands


def test_ray_accepts_what_the_example_of_stoker_up_becomes() -> None:
    file = read_cluster_file(DEPLOY / "cluster.toml")

    found = prepared(json.dumps(ray_file(file, "/tmp/token", "/tmp/source")))

    assert found["provider"]["head_ip"] == file.nodes.head
    assert found["max_workers"] == len(file.nodes.workers)


@pytest.mark.skipif(shutil.which("rsync") is None, reason="there is no rsync here")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_goes_to_the_nodes_is_all_that_pip_needs_and_no_model(
    path: Path, tmp_path: Path
) -> None:
    source, there = tmp_path / "source", tmp_path / "there"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = [name.replace(".", "/") for name in project["tool"]["setuptools"]["packages"]]
    for folder in (*packages, ".venv", "build", "models/smollm2"):
        (source / folder).mkdir(parents=True, exist_ok=True)
    excluded = prepared(path.read_text(encoding="utf-8"))["rsync_exclude"]
    options = [f"--exclude={pattern}" for pattern in excluded]

    subprocess.run(["rsync", "--archive", *options, f"{source}/", there], check=True)

    assert [name for name in packages if not (there / name).is_dir()] == []
    assert not [name for name in (".venv", "build", "models") if (there / name).exists()]
    assert excluded == NOT_SOURCE


def test_the_shipped_file_and_stoker_up_start_rays_head_with_the_same_settings() -> None:
    text = (DEPLOY / "ray-cluster.yaml").read_text(encoding="utf-8")

    for name, value in HEAD_ENVIRONMENT.items():
        assert f"{name}={value}" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('head = "10.0.0.1"', ""), "head"),
        (('workers = ["10.0.0.2"]', 'workers = ["10.0.0.1"]'), "named twice: 10.0.0.1, 10.0.0.1"),
        (('name = "stoker"', 'name = "a b"'), "name='a b' is not of letters"),
        (("port = 8000", 'backend = "local"'), r"\[serve\] may not set backend"),
        (("tensor_parallel_size = 2", "tensor_parallel_size = 0"), "tensor_parallel_size=0"),
        (("tensor_parallel_size = 2", "tensor_parallel = 2"), "tensor_parallel"),
    ],
    ids=["no head", "twice", "name", "ours", "value", "unknown"],
)
def test_a_cluster_file_that_cannot_be_is_refused_with_the_place(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    text = (DEPLOY / "cluster.toml").read_text(encoding="utf-8")
    (tmp_path / "cluster.toml").write_text(text.replace(*change))

    with pytest.raises(ConfigError, match=said):
        read_cluster_file(tmp_path / "cluster.toml")
