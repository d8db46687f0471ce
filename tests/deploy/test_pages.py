"""The pages about deploying: what they name is there, and the values they show make a server."""

import re

import kubernetes_validate
import yaml

from tests.deploy.files import (
    DEPLOY,
    ROOT,
    containers,
    documents,
    pods,
    render,
    settings_of,
    words_of,
)

PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
INDEX = (DEPLOY / "README.md").read_text(encoding="utf-8")


def test_the_index_names_every_file_that_somebody_may_want() -> None:
    named = set(re.findall(r"deploy/([\w./-]+)", INDEX))
    parts = {"Dockerfile.dockerignore", "README.md"}
    there = {
        path.relative_to(DEPLOY).as_posix()
        for path in DEPLOY.rglob("*")
        if path.is_file() and DEPLOY / "helm" not in path.parents
    }
    assert there - parts <= named
    assert "helm/stoker" in named


def test_every_file_that_the_page_names_is_there() -> None:
    for name in re.findall(r"(?<![\w/])(deploy/[\w./-]*\w)", PAGE):
        assert (ROOT / name).exists(), f"docs/deploy.md names {name}"


def test_the_values_on_the_page_make_manifests_that_kubernetes_takes() -> None:
    (text,) = re.findall(r"(?ms)--values - <<END\n(.*?)^END$", PAGE)
    values = yaml.safe_load(text)

    made = documents(render(values))

    for document in made:
        kubernetes_validate.validate(document, "1.37", strict=True)
    (server,) = (containers(pod)["stoker"] for document in made for pod in pods(document))
    config, _ = settings_of(words_of(server))
    assert server["image"] == "registry.example/stoker:cuda"
    assert config.num_ranks == values["gpus"]
    assert config.device == "cuda"


def test_the_page_names_the_ports_and_services_that_there_are() -> None:
    for service, where in (
        ("stoker", "kubernetes/stoker.yaml"),
        ("stoker-http", "kuberay/raycluster.yaml"),
    ):
        assert f"port-forward service/{service} 8000:80" in PAGE
        text = (DEPLOY / where).read_text(encoding="utf-8")
        assert re.search(rf"(?m)^kind: Service\nmetadata:\n  name: {service}$", text)
