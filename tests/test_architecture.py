"""The walls of the house: who may import what, and what is said nowhere at all.

Read from the source, so an import inside a function counts as well as one at the top.
"""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "kvcache": {"kvcache", "numpy"},
    "scheduler": {"scheduler", "kvcache", "msgspec", "numpy"},
    "worker": {
        "worker",
        "scheduler.arrays",
        "scheduler.plan",
        "scheduler.sampling",
        "kvcache.geometry",
        "kvcache.table",
        "llguidance",
        "msgspec",
        "numpy",
        "safetensors",
        "torch",
        "transformers",
        "triton",
    },
    "cluster": {
        "cluster",
        "worker",
        "scheduler",
        "kvcache",
        "fastapi",
        "gguf",
        "huggingface_hub",
        "jinja2",
        "llguidance",
        "msgspec",
        "numpy",
        "opentelemetry",
        "prometheus_client",
        "psutil",
        "pydantic",
        "ray",
        "starlette",
        "tokenizers",
        "torch",
        "uvicorn",
        "httptools",
        "uvloop",
        "zmq",
    },
    "stoker": {
        "stoker",
        "cluster",
        "scheduler",
        "httptools",
        "matplotlib",
        "msgspec",
        "psutil",
        "rich",
    },
}
"""What each package may import beside the standard library; `a` stands for `a.b` too."""

STATEFUL_STDLIB = {
    "asyncio",
    "datetime",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
}
"""Clocks, chance and the world outside: arguments, to `kvcache` and `scheduler`."""

ONLY_IN = {
    "zmq": ("cluster/links/",),
    "httptools": ("stoker/bench/http_client.py", "cluster/api/siblings.py"),
    "matplotlib": ("stoker/bench/plot.py",),
    "ray": ("cluster/ray_",),
    **dict.fromkeys(("fastapi", "pydantic", "starlette", "uvicorn", "uvloop"), ("cluster/api/",)),
    **dict.fromkeys(("opentelemetry", "prometheus_client"), ("cluster/api/",)),
    "llguidance": ("worker/grammar.py", "worker/guide.py", "cluster/frontend/grammar.py"),
    "torch": ("worker/", "cluster/model_runners.py"),
    "triton": ("worker/ops/cuda.py", "worker/ops/triton/"),
    "transformers": ("worker/models/",),
}
"""Libraries that one place alone may import."""

READS_ENVIRONMENT = ("cluster/config.py", "stoker/cli.py")
"""Beside these, the `*_main.py` of a process may take the arguments it was started with."""

PICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
PICKLING_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_pyobj",
    "scatter_object_list",
    "send_pyobj",
    "torch.load",
    "torch.save",
}

LIGHT_IMPORTS = {
    "import stoker; from stoker import Client, AsyncClient, SamplingParams": {
        "llguidance",
        "fastapi",
        "ray",
        "torch",
        "transformers",
    },
    "import cluster.engine": {"ray", "torch", "transformers"},
    "import scheduler.scheduler": {"ray", "torch", "zmq"},
}
"""What a program may say without paying for the modules beside it."""

PACKAGES = tuple(MAY_IMPORT)
SOURCES = {
    path.relative_to(ROOT).as_posix(): path for p in PACKAGES for path in (ROOT / p).rglob("*.py")
}


def text_of(source: str) -> str:
    return SOURCES[source].read_text(encoding="utf-8")


def tree_of(source: str) -> ast.Module:
    return ast.parse(text_of(source), filename=source)


@cache
def imported_modules(source: str) -> frozenset[str]:
    """Dotted names that a file imports; `from scheduler import plan` counts as `scheduler.plan`."""
    names: set[str] = set()
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source} imports relatively"
            module = node.module or ""
            if module in PACKAGES:
                names |= {f"{module}.{alias.name}" for alias in node.names}
            else:
                names.add(module)
    return frozenset(names)


def is_allowed(name: str, allowed: set[str]) -> bool:
    parts = name.split(".")
    return parts[0] in sys.stdlib_module_names or any(
        ".".join(parts[:length]) in allowed for length in range(1, len(parts) + 1)
    )


@cache
def dotted_names(source: str) -> tuple[str, ...]:
    """Every `a.b` and every imported `b` of `from a import b`, as `a.b`."""
    names: list[str] = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_its_layer_allows(package: str) -> None:
    sources = [source for source in SOURCES if source.startswith(f"{package}/")]
    assert sources
    for source in sources:
        bad = {n for n in imported_modules(source) if not is_allowed(n, MAY_IMPORT[package])}
        assert not bad, f"{source} may not import {sorted(bad)}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_behind_a_wall_is_imported_in_one_place_alone(library: str) -> None:
    users = {s for s in SOURCES if any(n.split(".")[0] == library for n in imported_modules(s))}
    bad = {user for user in users if not user.startswith(ONLY_IN[library])}
    assert not bad, f"only {ONLY_IN[library]} may import {library}, but {sorted(bad)} do"


@pytest.mark.parametrize("package", ["kvcache", "scheduler"])
def test_the_deciding_packages_ask_nobody_for_time_chance_or_the_environment(package: str) -> None:
    for source in SOURCES:
        if source.startswith(f"{package}/"):
            bad = {n for n in imported_modules(source) if n.split(".")[0] in STATEFUL_STDLIB}
            assert not bad, f"{source} may not import {sorted(bad)}: take it as an argument"


def set_variables(source: str) -> int:
    """How often a file sets a variable for libraries and child processes, which is not reading."""
    return sum(
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "os.environ"
        for node in ast.walk(tree_of(source))
    )


def test_the_environment_and_the_arguments_are_read_in_one_place_alone() -> None:
    for source in SOURCES:
        if source in READS_ENVIRONMENT:
            continue
        names = dotted_names(source)
        asks = names.count("os.environ")
        asks -= set_variables(source) if asks else 0
        asks += names.count("os.getenv") + names.count("os.environb")
        asks += 0 if source.endswith("_main.py") else names.count("sys.argv")
        assert not asks, f"{source} asks the outside; only {READS_ENVIRONMENT} may"


def allows_pickle(source: str) -> bool:
    """Whether a call gives `allow_pickle` anything but False."""
    if "allow_pickle" not in text_of(source):
        return False
    return any(
        keyword.arg == "allow_pickle"
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    )


def test_nothing_is_ever_pickled() -> None:
    for source in SOURCES:
        bad = {n for n in imported_modules(source) if n.split(".")[0] in PICKLERS}
        bad |= {
            name
            for name in dotted_names(source)
            if name in PICKLING_CALLS or name.split(".")[-1] in PICKLING_CALLS
        }
        assert not bad, f"{source} uses {sorted(bad)}"
        assert not allows_pickle(source), f"{source} lets numpy unpickle"


def test_init_files_hold_a_docstring_and_nothing_more() -> None:
    for source in SOURCES:
        if source.endswith("/__init__.py") and source != "stoker/__init__.py":
            body = tree_of(source).body
            assert len(body) == 1, f"{source} holds more than a docstring"
            assert ast.get_docstring(tree_of(source)), f"{source} has no docstring"


def test_every_folder_of_code_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    installed = set(settings["tool"]["setuptools"]["packages"])
    folders = {source.rpartition("/")[0].replace("/", ".") for source in SOURCES}
    assert folders == installed


@pytest.mark.parametrize("statement", LIGHT_IMPORTS)
def test_a_light_import_stays_light(statement: str) -> None:
    """In a fresh interpreter, since this one has loaded everything already."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    heavy = LIGHT_IMPORTS[statement].intersection(done.stdout.split())
    assert not heavy, f"{statement!r} loads {sorted(heavy)}"
