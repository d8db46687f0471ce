"""The Dockerfile by hadolint, compose files by a parser of Compose's rules, the unit by systemd,
and every `stoker` command line in deploy/ by our own parser.
"""

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import cast

import compose_spec
import pytest
import yaml

from tests.deploy.files import DEPLOY, ROOT, SETTINGS, Tree, every_command, parts, read, settings_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def test_every_stoker_command_is_one_that_the_parser_and_the_settings_take() -> None:
    commands = every_command()
    for where, words in commands.items():
        try:
            settings_of([word.replace("/etc/stoker/stoker.toml", str(SETTINGS)) for word in words])
        except SystemExit:
            pytest.fail(f"{where} says `stoker {' '.join(words)}`, which the command refuses")
    named = {where.partition(",")[0] for where in commands}
    assert named >= {"Dockerfile", "compose.yaml", "stoker.service", "chart"}
    assert named >= {"kubernetes/stoker.yaml", "kuberay/raycluster.yaml", "kuberay/rayjob.yaml"}


def test_hadolint_has_nothing_to_say_against_the_dockerfile() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, "--no-color", DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_the_torch_and_the_packages_that_the_project_names() -> None:
    dependencies = PROJECT["project"]["dependencies"]
    (torch,) = (one for one in dependencies if one.startswith("torch=="))
    assert re.findall(r"torch==[\w.]+", DOCKERFILE) == [torch]
    copied = set(re.findall(r"(?m)^COPY (\w+) \1$", DOCKERFILE))
    assert copied == {name.partition(".")[0] for name in PROJECT["tool"]["setuptools"]["packages"]}
    users = re.findall(r"(?m)^USER (\S+)$", DOCKERFILE)
    assert users[-1] == "10001:10001"


def test_the_builds_context_holds_what_the_dockerfile_copies_and_nothing_else() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    copies = re.findall(r"(?m)^COPY (?!--from)(.*) \S+$", DOCKERFILE)
    wanted = {word for line in copies for word in line.split()}
    assert let_in == wanted
    assert all((ROOT / name).exists() for name in wanted)
    assert "*" in lines


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_a_compose_file_is_one_by_composes_own_rules(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    compose_spec.PyCompose.from_yaml(text).validate()
    for part in parts(yaml.safe_load(text)):
        assert not {key for key in part if str(key).startswith("x-")}


def test_the_rules_of_compose_refuse_a_field_that_is_none() -> None:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="shm_sizes"):
        compose_spec.PyCompose.from_yaml(text.replace("shm_size:", "shm_sizes:"))


def test_the_compose_file_brings_what_it_mounts_and_configures_and_waits_for_the_drain() -> None:
    (compose,) = read("compose.yaml")
    services = cast("dict[str, Tree]", compose["services"])
    server = services["stoker"]
    config, http = settings_of(cast("list[str]", server["command"]))
    grace_s = int(str(server["stop_grace_period"]).removesuffix("s"))
    assert grace_s >= config.drain_s + 4 * config.stop_timeout_s
    assert (
        f"{http.port}/health" in cast("list[str]", cast("Tree", server["healthcheck"])["test"])[-1]
    )
    assert server["ports"] == [f"127.0.0.1:{http.port}:{http.port}"]
    for service in services.values():
        for volume in cast("list[str]", service["volumes"]):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_file()
    configs = cast("dict[str, Tree]", compose["configs"])
    scraped = yaml.safe_load(str(configs["prometheus"]["content"]))
    of_one_host = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    assert scraped["global"] == of_one_host["global"]
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"stoker:{http.port}"]}]
    (board,) = yaml.safe_load(str(configs["grafana-dashboards"]["content"]))["providers"]
    mounted = [str(one) for one in cast("list[str]", services["grafana"]["volumes"])]
    assert any(f":{board['options']['path']}/" in volume for volume in mounted)


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "stoker.service", encoding="utf-8")
    return parser


def test_case_112_systemd_asks_with_the_signal_we_drain_on_and_waits_for_the_drain() -> None:
    service = unit()["Service"]
    config, http = settings_of(["serve", "--config", str(SETTINGS)])
    assert service["ExecStart"].endswith("stoker serve --config /etc/stoker/stoker.toml")
    assert service["KillSignal"] == "SIGTERM"
    assert service["KillMode"] == "mixed", "the supervisor alone is asked; it asks the others"
    assert int(service["TimeoutStopSec"]) >= config.drain_s + 4 * config.stop_timeout_s
    assert service["Type"] == "exec", "we send no readiness to systemd"
    assert config.models_dir.startswith(f"/var/lib/{service['StateDirectory']}/")
    assert http.host == "127.0.0.1"


if shutil.which("systemd-analyze"):  # else there is nobody to ask

    def test_systemd_has_nothing_to_say_against_the_unit(tmp_path: Path) -> None:
        text = (DEPLOY / "stoker.service").read_text(encoding="utf-8")
        here = tmp_path / "stoker.service"
        ours = str(Path(sys.executable).parent / "stoker")
        here.write_text(text.replace("/opt/stoker/.venv/bin/stoker", ours), encoding="utf-8")
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", here],
            capture_output=True,
            text=True,
            check=False,
        )
        said = [line for line in done.stderr.splitlines() if "stoker.service" in line]
        assert (said, done.returncode) == ([], 0)
