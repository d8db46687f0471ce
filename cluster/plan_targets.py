"""Which model and which machine a plan is for, found without loading or fetching anything."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from cluster.engine_config import EngineConfig
from cluster.errors import ModelError
from cluster.gpus import GPUS, MIB, Gpu, find_gpu, gpus_here
from cluster.known_models import KNOWN_MODELS
from cluster.models import DEFAULT_MODEL, SMOLLM2_FOLDER
from cluster.planning import Machine
from scheduler.errors import ConfigError
from worker.estimate import kernel_level
from worker.host_memory import free_host_bytes
from worker.models.spec import ModelSpec, read_spec, spec_from

HEADER_LIMIT = 100 << 20
"""Of a safetensors file's header, as the format's own readers have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model whose shape is known, and whose weights may be here or not."""

    name: str
    spec: ModelSpec
    num_parameters: int
    """In the files, if they are here, else by the shape alone."""
    file_bytes: int
    """Of its weight files; 0: none are here."""


def find_model(model: str | None, models_dir: Path) -> PlannedModel:
    """A folder, a config.json, a model that was fetched, or one of `KNOWN_MODELS`.

    Raises:
        ModelError: it is none of them, or its config.json is not one that workers can read.
    """
    name = model or DEFAULT_MODEL
    path = Path(name).expanduser()
    kept = models_dir / (SMOLLM2_FOLDER if name == DEFAULT_MODEL else name)
    for folder in (path, kept):
        if (folder / "config.json").is_file():
            return _in_folder(name, folder)
    if path.suffix == ".json" and path.is_file():
        return _planned(name, spec_from(_read_json(path), path))
    known = KNOWN_MODELS.get(_known_name(name))
    if known is not None:
        return _planned(name, spec_from(known, Path(name)))
    raise ModelError(
        f"no model {name!r} to plan for: there is no folder or config.json of that name, and it "
        f"was not fetched into {models_dir}. Known without files are "
        f"{', '.join(sorted(KNOWN_MODELS))}"
    )


def _known_name(name: str) -> str:
    """`meta-llama/Llama-3.1-8B-Instruct` is llama-3.1-8b."""
    if name == DEFAULT_MODEL:
        return "smollm2-135m"
    last = name.rpartition("/")[2].lower()
    return last.removeprefix("meta-").removesuffix("-instruct")


def _read_json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object, got a {type(found).__name__}")
    return found


def _in_folder(name: str, folder: Path) -> PlannedModel:
    spec = read_spec(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return _planned(name, spec)
    return PlannedModel(
        name=name,
        spec=spec,
        num_parameters=sum(_parameters_in(file) for file in files),
        file_bytes=sum(file.stat().st_size for file in files),
    )


def _parameters_in(file: Path) -> int:
    """By the header alone: eight bytes of its length, then JSON."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > HEADER_LIMIT:
            raise ModelError(f"{file} is not a safetensors file: its header has {length} bytes")
        try:
            header = json.loads(opened.read(length))
            tensors = [header[name]["shape"] for name in header if name != "__metadata__"]
            return sum(_product(shape) for shape in tensors)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{file} is not a safetensors file: {error!r}") from None


def _product(shape: list[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def _planned(name: str, spec: ModelSpec) -> PlannedModel:
    return PlannedModel(name=name, spec=spec, num_parameters=spec.num_parameters, file_bytes=0)


def find_machine(
    config: EngineConfig,
    *,
    gpu: str | None = None,
    gpu_memory_gib: float | None = None,
    num_nodes: int = 1,
    gpus_per_node: int | None = None,
    host_memory_gib: float | None = None,
) -> Machine:
    """The named machine; without names, this one.

    Raises:
        ConfigError: there is no such GPU, or none here.
    """
    if config.device == "cpu" or not (gpu or gpu_memory_gib):
        here = () if config.device == "cpu" else gpus_here()
        if here:
            return Machine(
                name=f"this machine's {here[0].name}",
                num_nodes=num_nodes,
                slots_per_node=gpus_per_node or len(here),
                gpu=here[0],
            )
        if config.device == "cuda":
            raise ConfigError(
                "device=cuda, but no GPU was named and nvidia-smi finds none here. Name one with "
                "--gpu or --gpu-memory-gib"
            )
        return _host(num_nodes, host_memory_gib)
    found = find_gpu(gpu) if gpu else None
    if gpu and found is None and gpu_memory_gib is None:
        raise ConfigError(
            f"no figures of a GPU called {gpu!r}. Known are "
            f"{', '.join(each.name for each in GPUS)}; of another, give --gpu-memory-gib"
        )
    if gpu_memory_gib is not None:
        speed = found or Gpu("", 0, 0.0, 0.0)
        label = gpu or f"GPU of {gpu_memory_gib:g} GiB"
        found = Gpu(label, int(gpu_memory_gib * 1024), speed.bandwidth_gb_s, speed.bf16_tflops)
    assert found is not None
    return Machine(
        name=found.name, num_nodes=num_nodes, slots_per_node=gpus_per_node or 1, gpu=found
    )


def _host(num_nodes: int, memory_gib: float | None) -> Machine:
    cores = len(os.sched_getaffinity(0))
    free = free_host_bytes() if memory_gib is None else int(memory_gib * 1024 * MIB)
    return Machine(
        name="this machine's CPU" if num_nodes == 1 else "CPUs like this machine's",
        num_nodes=num_nodes,
        slots_per_node=cores,
        host_bytes=free,
        level=kernel_level(),
    )
