"""What lies in deploy/: its YAML, the chart as Kubernetes gets it, and every `stoker` command."""

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias, cast

import helm_python
import yaml

from cluster.config import load_config_over, load_http_config
from cluster.engine_config import EngineConfig
from cluster.http_config import HttpConfig
from stoker.cli import make_parser
from stoker.serve_command import DRAIN_S

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "stoker"
SETTINGS = DEPLOY / "stoker.toml"

Tree: TypeAlias = dict[str, object]

VARIANTS: dict[str, Tree] = {
    "as it is": {},
    "gpus": {
        "gpus": 8,
        "cpus": 16,
        "model": "Qwen/Qwen3-32B",
        "tensorParallelSize": 2,
        "pipelineParallelSize": 2,
        "numGroups": 2,
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "runtimeClassName": "nvidia",
    },
    "all that can be said": {
        "replicas": 3,
        "cpus": 7,
        "numGroups": 3,
        "servedModelNames": ["one", "two"],
        "models": {"existingClaim": "models"},
        "apiKeys": {"existingSecret": "keys"},
        "huggingFace": {"existingSecret": "hub"},
        "drain": {"routing": 15, "running": 600, "ending": 45},
        "startTimeout": 7201,
        "extraArgs": ["--quantization=int8", "--max-num-seqs", "32"],
        "extraEnv": [{"name": "STOKER_LOG_LEVEL", "value": "debug"}],
        "imagePullSecrets": [{"name": "pull"}],
        "networkPolicy": {"enabled": True, "allowFrom": {"app": "gateway"}},
        "podAnnotations": {"team": "stokers"},
        "priorityClassName": "high",
    },
}


def documents(text: str) -> list[Tree]:
    return [document for document in yaml.safe_load_all(text) if document]


@cache
def read(name: str) -> list[Tree]:
    """The YAML documents of a file in deploy/; not to be changed."""
    return documents((DEPLOY / name).read_text(encoding="utf-8"))


def render(values: Tree) -> str:
    """What `helm template` makes of the chart, in the order of file names."""
    with helm_python.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="stoker", namespace="default")
    made = [texts[name].strip("\n") for name in sorted(texts) if name.endswith(".yaml")]
    return "".join(f"---\n{text}\n" for text in made if text)


@cache
def rendered(variant: str) -> str:
    """The same of one of VARIANTS."""
    return render(VARIANTS[variant])


@cache
def manifests() -> dict[str, list[Tree]]:
    """Everything for Kubernetes, by where it comes from."""
    files = ("kubernetes/stoker.yaml", "kuberay/raycluster.yaml", "kuberay/rayjob.yaml")
    return {name: read(name) for name in files} | {
        f"chart, {variant}": documents(rendered(variant)) for variant in VARIANTS
    }


def parts(node: object) -> Iterator[Tree]:
    """Every mapping in a tree, outermost first."""
    if isinstance(node, dict):
        yield node
    if isinstance(node, (dict, list)):
        for child in node.values() if isinstance(node, dict) else node:
            yield from parts(child)


def pods(document: Tree) -> list[Tree]:
    """The templates of Pods in a manifest."""
    templates = (part.get("template") for part in parts(document))
    return [pod for pod in templates if isinstance(pod, dict)]


def containers(pod: Tree) -> dict[str, Tree]:
    spec = cast("Tree", pod["spec"])
    return {str(one["name"]): one for one in cast("list[Tree]", spec["containers"])}


def words_of(container: Tree) -> list[str]:
    """The command line of a container that runs the image's own entry point, or a shell's."""
    words = [str(word) for word in cast("list[object]", container.get("args", []))]
    if "command" in container:
        (script,) = words
        return commands_in(script)[0]
    return words


def commands_in(text: str) -> list[list[str]]:
    """`stoker ...` of a shell's text, as words after `stoker`."""
    lines = re.sub(r"\\\n\s*", " ", text)
    found = re.findall(
        r"(?m)(?:^|[\s;='/])stoker ((?:serve|generate|chat|status|fetch|bench)\b[^;|&\n`]*)", lines
    )
    return [shlex.split(line.rstrip("'"), comments=True) for line in found]


@cache
def every_command() -> dict[str, list[str]]:
    """Each `stoker` command line in deploy/, by where it stands."""
    found: dict[str, list[str]] = {}
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_dir() or "helm" in path.parts or path.suffix == ".json":
            continue
        name = path.relative_to(DEPLOY).as_posix()
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".yaml":
            text = shell_texts(name, documents(text), found)
        elif path.name == "Dockerfile":
            (command,) = re.findall(r"(?m)^CMD (\[.*\])$", text)
            found[name] = json.loads(command)
        for number, words in enumerate(commands_in(text)):
            found[f"{name}, {number}"] = words
    for variant in VARIANTS:
        shell_texts(f"chart, {variant}", documents(rendered(variant)), found)
    return found


def shell_texts(name: str, trees: list[Tree], found: dict[str, list[str]]) -> str:
    """Put lists that begin with `serve` into `found`; give back texts that a shell gets."""
    texts: list[str] = []
    for part in parts(trees):
        for key in ("args", "command", "entrypoint"):
            value = part.get(key)
            if isinstance(value, list) and value[:1] == ["serve"]:
                found[f"{name}, {part.get('name', key)}"] = [str(word) for word in value]
            elif isinstance(value, list):
                texts += map(str, value)
            elif isinstance(value, str):
                texts.append(value)
    return "\n".join(texts)


def settings_of(words: list[str]) -> tuple[EngineConfig, HttpConfig]:
    """What a command line comes to; raises if the parser or the settings refuse it."""
    arguments = make_parser().parse_args(words)
    http = load_http_config(arguments) if words[0] == "serve" else HttpConfig()
    return load_config_over({"drain_s": DRAIN_S}, arguments), http
