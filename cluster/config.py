"""All settings, and the only place that reads files, arguments and the environment for them.

A setting has one name everywhere: `LLM(max_num_seqs=8)`, `max_num_seqs = 8` in a TOML file,
`--max-num-seqs 8`. What is given last in this order holds: default, file, environment,
argument. Values are checked once, here; measured ones are never written back.
"""

import argparse
import difflib
import fnmatch
import importlib.util
import os
import re
import tomllib
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from cluster.errors import AddressError
from cluster.http_config import HttpConfig
from cluster.links import check_address, is_wildcard
from cluster.node_address import choose_address, own_addresses
from cluster.setting import (
    AtLeastOne,
    NotNegative,
    OneOrTwo,
    Positive,
    Share,
    ShareBelowOne,
    TimeOrNone,
    add_options,
    setting,
    words_or_bounds,
)
from scheduler.config import SchedulerConfig
from scheduler.errors import ConfigError

GPU_MARK = Path("/proc/driver/nvidia/version")
"""Exists where NVIDIA's driver is loaded."""


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole cluster: model, groups, memory, queues, sockets, limits in time.

    Use `config_from`, which checks; each field's text is what `--help` shows.
    """

    model: Annotated[
        str | None,
        setting("Folder, GGUF file, `smollm2`, or Hugging Face name of the model."),
    ] = None
    models_dir: Annotated[str, setting("Where fetched and converted models are kept.")] = "models"
    chat_template: Annotated[
        str, setting("Jinja file that renders chats, instead of the model's own template.")
    ] = ""

    tensor_parallel_size: Annotated[
        AtLeastOne, setting("Ranks that share each layer of one replica of the model.")
    ] = 1
    pipeline_parallel_size: Annotated[
        AtLeastOne,
        setting("Stages that one replica's layers are dealt to, tensor_parallel_size ranks each."),
    ] = 1
    num_groups: Annotated[
        AtLeastOne, setting("Replicas of the model, each with its own KV pool.")
    ] = 1
    min_groups: Annotated[
        AtLeastOne | None,
        setting("Fewest groups when load decides. Default: as many as at the start."),
    ] = None
    max_groups: Annotated[
        AtLeastOne | None,
        setting(
            "Most groups while it runs; memory and cores of CPU hosts are dealt out for so many. "
            "With more than min_groups, load decides. Default: num_groups on CPUs, else any."
        ),
    ] = None
    backend: Annotated[
        Literal["ray", "local"], setting("Who starts the workers: Ray, or plain processes here.")
    ] = "ray"
    ray_address: Annotated[
        str, setting("HOST:PORT of a running Ray, or `auto`. Default: a Ray of our own, here.")
    ] = ""
    room_timeout_s: Annotated[
        TimeOrNone,
        setting(
            "With ray_address: how long nodes may take to join if those that are there have too "
            "little room for all ranks."
        ),
    ] = 30.0
    worker_env: Annotated[
        tuple[str, ...],
        setting(
            "With ray_address: name of an environment variable, or PREFIX*, that workers on other "
            "nodes get from here unless their node has its own. Default: HF_*, NCCL_*, GLOO_*, "
            "OMP_*."
        ),
    ] = ("HF_*", "NCCL_*", "GLOO_*", "OMP_*")
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        setting("What ranks compute on; auto: GPUs where this host has some."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        setting("Of weights; auto: the checkpoint's own."),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8"],
        setting("Of K/V; auto: as dtype. int8 (CPUs) holds nearly 4x float32's tokens."),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        setting("int8: a byte per weight, made from any checkpoint while it loads; CPUs only."),
    ] = "none"
    ops: Annotated[
        Literal["auto", "reference", "cpu", "cuda"],
        setting("Set of operations; auto: the device's fast one."),
    ] = "auto"
    enforce_eager: Annotated[
        bool, setting("On GPUs, no CUDA graphs: a faster start, slower decode steps.")
    ] = False
    warm_weights: Annotated[
        bool,
        setting(
            "On CPUs, keep each host's packed weights once, for all groups there and for ranks "
            "that are started again. Off: each rank reads and holds its own."
        ),
    ] = True
    num_threads: Annotated[
        AtLeastOne | None, setting("CPU threads of each rank. Default: its share of the cores.")
    ] = None
    pin_cores: Annotated[bool, setting("Keep each CPU rank on its own cores.")] = True

    max_model_len: Annotated[
        AtLeastOne | None, setting("Most tokens of a sequence. Default: what the model says.")
    ] = None
    block_size: Annotated[
        AtLeastOne, setting("Tokens per KV block. More: coarser prefix reuse, more waste.")
    ] = 16
    gpu_memory_utilization: Annotated[
        Share, setting("Share of the device's memory (CPU: of the free memory) to use.")
    ] = 0.8
    kv_cache_memory_bytes: Annotated[
        AtLeastOne | None, setting("KV memory of each rank, instead of what the share leaves.")
    ] = None
    num_kv_blocks: Annotated[
        AtLeastOne | None, setting("KV blocks of each group, taken as said, instead of either.")
    ] = None
    enable_prefix_caching: Annotated[bool, setting("Reuse K/V of equal prefixes.")] = True

    max_num_seqs: Annotated[
        AtLeastOne,
        setting("Sequences that run at once in a group. More: throughput, longer steps."),
    ] = 256
    max_num_batched_tokens: Annotated[
        AtLeastOne | None,
        setting(
            "Tokens computed per step. More: prompts start sooner, streams stutter. "
            "Default: 512 on CPUs, 2048 on GPUs."
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        NotNegative, setting("Most tokens of one prompt per step; 0: what is left of the step.")
    ] = 0
    scheduling_policy: Annotated[Literal["fcfs", "priority"], setting("Who starts next.")] = "fcfs"
    priority_ageing_s: Annotated[
        Positive, setting("Waiting this long is worth one level of priority.")
    ] = 10.0
    max_waiting_requests: Annotated[
        AtLeastOne, setting("More are refused at once. More: a longer queue.")
    ] = 4096
    max_waiting_tokens: Annotated[
        AtLeastOne, setting("Prompt tokens in the queue above which requests are refused.")
    ] = 4_194_304
    max_queue_s: Annotated[
        TimeOrNone | None,
        setting(
            "Requests that would wait longer for their turn are refused at once. Less: first "
            "tokens stay prompt under overload. Default: the two limits above alone."
        ),
    ] = None
    max_plans_in_flight: Annotated[
        OneOrTwo, setting("Steps sent ahead of their answers. 1 is for debugging.")
    ] = 2
    watermark: Annotated[
        ShareBelowOne, setting("Share of blocks left idle at admission. More: fewer preemptions.")
    ] = 0.02
    max_head_bypasses: Annotated[
        NotNegative, setting("Smaller requests that may start before a blocked first one.")
    ] = 32
    exclusive_phases: Annotated[
        bool, setting("Steps hold prompts or streams, never both; for comparisons.")
    ] = False

    front_address: Annotated[
        str, setting("Where clients dial: tcp://HOST:PORT (0: any) or ipc://PATH.")
    ] = ""
    back_address: Annotated[
        str, setting("Where workers dial; tcp:// if they are on other hosts.")
    ] = ""
    encrypt: Annotated[
        bool,
        setting("Encrypt tcp:// sockets and let in only holders of the keys made at the start."),
    ] = True
    key_file: Annotated[
        str,
        setting(
            "File, written at the start for its owner alone, that clients of an encrypted "
            "front_address need. Default: one that the start names, gone at the end."
        ),
    ] = ""
    socket_dir: Annotated[
        str,
        setting("Folder for the private folder of ipc:// sockets. Default: the temporary one."),
    ] = ""
    client_queue: Annotated[
        AtLeastOne, setting("Messages that may wait for a client before it is cut off.")
    ] = 1000

    start_timeout_s: Annotated[Positive, setting("Longest time from launch to ready.")] = 300.0
    step_timeout_s: Annotated[
        Positive, setting("A group that leaves a step unanswered for this long is lost.")
    ] = 60.0
    peer_timeout_s: Annotated[
        Positive, setting("Silence after which a tcp:// connection counts as dead.")
    ] = 10.0
    recovery_s: Annotated[
        TimeOrNone,
        setting(
            "How long requests whose engine is gone wait for another one, behind the tokens that "
            "clients have. 0: they fail at once."
        ),
    ] = 60.0
    drain_s: Annotated[
        TimeOrNone, setting("Time that running requests get when asked to stop.")
    ] = 0.0
    handover: Annotated[
        bool,
        setting(
            "SIGTERM replaces every process by one with the code that is installed now, as "
            "`stoker upgrade` and SIGUSR2 do, and no request ends; SIGINT ends the cluster."
        ),
    ] = False
    stop_timeout_s: Annotated[
        Positive, setting("Longest time of each part of stopping before it is killed.")
    ] = 5.0
    max_restarts: Annotated[
        NotNegative,
        setting("Restarts in a row of a lost group; 0: it stays lost, and its streams with it."),
    ] = 3
    poison_after: Annotated[
        NotNegative,
        setting(
            "Failures of a group that a request can cause, after which one that was computed each "
            "time and got no further in between is given up; 0: never."
        ),
    ] = 2
    no_workers_s: Annotated[
        TimeOrNone,
        setting(
            "How long requests without a token wait while no group serves but one may come back."
        ),
    ] = 30.0

    longest_restart_pause_s: Annotated[
        TimeOrNone,
        setting("A lost group waits before it restarts: 1 s, then twice as long, up to this."),
    ] = 30.0
    takeover_s: Annotated[
        TimeOrNone,
        setting(
            "How long ranks that have their weights wait for another engine when theirs is gone, "
            "and that engine for them; 0: they end."
        ),
    ] = 30.0
    max_engine_restarts: Annotated[
        NotNegative,
        setting("Restarts in a row of an engine that died or hung; 0: the cluster ends with it."),
    ] = 3
    engine_hang_s: Annotated[
        TimeOrNone,
        setting(
            "Silence of the engine's own loop after which it is killed and started again; 0: it "
            "is waited for."
        ),
    ] = 20.0
    allow_chaos: Annotated[
        bool,
        setting("Let any client break this cluster on purpose (`stoker chaos`). For tests only."),
    ] = False

    journal: Annotated[str, setting("File for one record per step, for replay. Default: none.")] = (
        ""
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], setting("Least important event shown.")
    ] = "info"

    @property
    def ranks_per_group(self) -> int:
        """Worker processes of each group; rank = stage * tensor_parallel_size + its place there."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def keeps_weights(self) -> bool:
        """Whether hosts keep packed weights; of a resolved config."""
        return self.warm_weights and self.device == "cpu" and self.ops != "reference"

    @property
    def most_groups(self) -> int:
        """For which memory and cores of a host are dealt out."""
        return self.max_groups or self.num_groups

    @property
    def num_ranks(self) -> int:
        """Worker processes of all groups."""
        return self.num_groups * self.ranks_per_group

    def resolved(self, *, has_gpu: bool) -> "EngineConfig":
        """The same with what depends on the machine filled in: the device, and the step's size.

        Raises:
            ConfigError: a device that is not there, or settings that do not fit together.
        """
        if self.device == "cuda" and not has_gpu and not self.ray_address:
            raise ConfigError(
                "device=cuda, but this host has no NVIDIA driver. Use device=cpu, or a host "
                "with a GPU, or name the Ray whose nodes have some (ray_address)"
            )
        device = self.device if self.device != "auto" else ("cuda" if has_gpu else "cpu")
        self._check_groups()
        if self.quantization != "none" and (device == "cuda" or self.ops == "reference"):
            raise ConfigError(
                f"quantization={self.quantization} is made by the CPU's own operations, but "
                f"device={device} and ops={self.ops}. Use quantization=none, or device=cpu with "
                "ops=auto"
            )
        tokens = self.max_num_batched_tokens
        if tokens is None:
            tokens = max(2048 if device == "cuda" else 512, self.max_num_seqs)
        config = replace(self, device=device, max_num_batched_tokens=tokens)
        config.scheduler_config()
        return config

    def _check_groups(self) -> None:
        least = self.min_groups or self.num_groups
        most = self.max_groups or max(least, self.num_groups)
        if not least <= self.num_groups <= most:
            raise ConfigError(
                f"num_groups={self.num_groups} must be from min_groups={least} to "
                f"max_groups={most}: it is how many there are at the start"
            )

    def scheduler_config(self) -> SchedulerConfig:
        """The scheduler's part of a resolved config.

        Raises:
            ConfigError: settings that do not fit together.
        """
        assert self.max_num_batched_tokens is not None, "resolved comes first"
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=self.scheduling_policy,
            priority_ageing_s=self.priority_ageing_s,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_plans_in_flight=self.max_plans_in_flight,
            num_stages=self.pipeline_parallel_size,
            watermark=self.watermark,
            max_head_bypasses=self.max_head_bypasses,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            max_queue_s=self.max_queue_s,
            poison_after=self.poison_after,
            exclusive_phases=self.exclusive_phases,
        )


_HINTS = typing.get_type_hints(EngineConfig, include_extras=True)
_HTTP_HINTS = typing.get_type_hints(HttpConfig, include_extras=True)

_KINDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a text",
    "boolean": "true or false",
    "array": "a list of texts",
}

Settings = TypeVar("Settings", EngineConfig, HttpConfig)


def has_gpu() -> bool:
    """Whether this host has NVIDIA's driver; asked without importing torch."""
    return GPU_MARK.exists()


def is_http_setting(name: str) -> bool:
    """Whether it is one of `HttpConfig`; the others are the engine's."""
    return name in _HTTP_HINTS


def config_from(values: Mapping[str, object]) -> EngineConfig:
    """Check settings by name; those that are None or missing keep their defaults.

    Raises:
        ConfigError: an unknown name, a wrong type, or a value out of its range; the message
            names the setting, the value and what is possible.
    """
    config = _checked(values, EngineConfig, _HINTS)
    for name in ("front_address", "back_address"):
        address = getattr(config, name)
        if address:
            try:
                check_address(address)
            except AddressError as error:
                raise ConfigError(f"{name}: {error}") from error
    if config.ray_address and config.backend != "ray":
        raise ConfigError(
            f"ray_address={config.ray_address} is a Ray's, but backend={config.backend} starts "
            "workers without one. Leave one of the two away"
        )
    if is_wildcard(config.back_address):
        raise ConfigError(
            f"back_address={config.back_address} says no host: workers must dial it, so give an "
            "address of this host that all nodes reach"
        )
    return config


def http_config_from(values: Mapping[str, object]) -> HttpConfig:
    """The same for settings of HTTP.

    Raises:
        ConfigError: as above, or an empty key.
    """
    config = _checked(values, HttpConfig, _HTTP_HINTS)
    if not all(config.api_keys):
        raise ConfigError("api_keys holds an empty key, which everybody has. Give each a text")
    if config.otlp_endpoint:
        _check_endpoint(config.otlp_endpoint)
    return config


def _check_endpoint(endpoint: str) -> None:
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(
            f"otlp_endpoint={endpoint!r} is no address of a collector. Give an http:// or https:// "
            "URL, such as http://127.0.0.1:4318"
        )
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _is_installed(module):
            raise ConfigError(
                f"otlp_endpoint={endpoint} needs OpenTelemetry, and {module} is not installed. "
                "Install it with pip install 'stoker[otel]', or leave otlp_endpoint out"
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is what it is a part of
        return False


def _checked(
    values: Mapping[str, object], kind: type[Settings], hints: Mapping[str, object]
) -> Settings:
    given = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in values.items()
        if value is not None
    }
    for name in given:
        if name not in hints:
            raise ConfigError(f"there is no setting {name!r}. {_hint(name)}")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        # From None: a user who calls us from Python is shown what was wrong once.
        raise ConfigError(_complaint(error, given, kind)) from None


def _hint(name: str) -> str:
    close = difflib.get_close_matches(name, {**_HINTS, **_HTTP_HINTS}, n=1)
    return f"Did you mean {close[0]}?" if close else "`stoker serve --help` lists all"


def _complaint(
    error: msgspec.ValidationError, given: Mapping[str, object], kind: type[Settings]
) -> str:
    found = re.fullmatch(r"(?s).* - at `\$\.(\w+)(?:\[\d+\])?`", str(error))
    if found is None:
        return str(error)
    name = found[1]
    of_type, words, bounds = words_or_bounds(kind, name)
    wanted = f"one of {', '.join(words)}" if words else f"{_KINDS[of_type]} {bounds}".strip()
    return f"{name}={given[name]!r} is not possible: it must be {wanted}"


def encode_config(config: EngineConfig) -> bytes:
    """As JSON, for the supervisor's standard input."""
    return msgspec.json.encode(config)


def decode_config(data: bytes) -> EngineConfig:
    """Read and check what `encode_config` wrote, or anybody's JSON object of settings.

    Raises:
        ConfigError: not a JSON object, or not settings.
    """
    try:
        values = msgspec.json.decode(data, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError(f"the settings are not a JSON object: {error}") from error
    return config_from(values)


def read_config_file(path: Path) -> dict[str, object]:
    """Settings of a TOML file: names as everywhere, at the top level.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except ValueError as error:  # also tomllib.TOMLDecodeError and UnicodeDecodeError
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


ENVIRONMENT = {
    "STOKER_MODELS_DIR": "models_dir",
    "STOKER_LOG_LEVEL": "log_level",
    "STOKER_SOCKET_DIR": "socket_dir",
    "STOKER_KEY_FILE": "key_file",
}
"""The variables that are read, and the settings that they give. There are no others but
STOKER_CONFIG, the path of a config file, and the one below."""

NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Other libraries' own, of which `stoker doctor` says whether they fit this host."""

NODE_ADDRESS_VARIABLE = "STOKER_NODE_ADDRESS"
"""On a node of a Ray cluster, where others reach it, if that is not where Ray says. It must be set
where `ray start` runs there."""

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The same by the name of a network interface, as torch knows it."""

API_KEY_VARIABLE = "STOKER_API_KEY"
"""Gives `api_keys`, separated by commas: arguments can be read by others of this machine."""


def key_file_from_environment(environ: Mapping[str, str] | None = None) -> str:
    """The key file that a client uses if it is told of none; empty: none."""
    return (os.environ if environ is None else environ).get("STOKER_KEY_FILE", "")


def network_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of `NETWORK_VARIABLES` that are set, with their values."""
    variables = os.environ if environ is None else environ
    return {name: variables[name] for name in NETWORK_VARIABLES if variables.get(name)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each setting but `model`, and one for a file of them."""
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of settings; arguments win over it."
    )
    add_options(parser, EngineConfig, "settings of the cluster", but=("model",))


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each setting of HTTP."""
    add_options(parser, HttpConfig, "settings of HTTP")


def load_config(
    arguments: argparse.Namespace | None = None,
    environ: Mapping[str, str] | None = None,
    **keywords: object,
) -> EngineConfig:
    """Settings of the file, then the environment, then the arguments, then the keywords.

    Args:
        arguments: parsed by a parser that went through `add_arguments`; other names in it are
            ignored.
        environ: by default this process's environment.

    Raises:
        ConfigError: see `config_from`.
    """
    return load_config_over({}, arguments, environ, **keywords)


def load_config_over(
    defaults: Mapping[str, object],
    arguments: argparse.Namespace | None = None,
    environ: Mapping[str, str] | None = None,
    **keywords: object,
) -> EngineConfig:
    """The same, over what a command sets where nobody else does."""
    values = {**defaults, **_found(arguments, environ)}
    values |= {name: value for name, value in keywords.items() if value is not None}
    return config_from(values)


def _found(
    arguments: argparse.Namespace | None, environ: Mapping[str, str] | None
) -> dict[str, object]:
    variables = os.environ if environ is None else environ
    spoken = {} if arguments is None else vars(arguments)
    values = _of_file(spoken, variables, but=_HTTP_HINTS)
    values |= {name: variables[key] for key, name in ENVIRONMENT.items() if variables.get(key)}
    values |= {name: value for name, value in spoken.items() if name in _HINTS}
    return values


def load_http_config(
    arguments: argparse.Namespace | None = None, environ: Mapping[str, str] | None = None
) -> HttpConfig:
    """The same for settings of HTTP, which stand in the same file.

    Raises:
        ConfigError: see `http_config_from`.
    """
    variables = os.environ if environ is None else environ
    spoken = {} if arguments is None else vars(arguments)
    values = _of_file(spoken, variables, but=_HINTS)
    if keys := variables.get(API_KEY_VARIABLE):
        values["api_keys"] = [key.strip() for key in keys.split(",")]
    values |= {name: value for name, value in spoken.items() if name in _HTTP_HINTS}
    return http_config_from(values)


def _of_file(
    spoken: Mapping[str, object], variables: Mapping[str, str], *, but: Collection[str]
) -> dict[str, object]:
    """The settings of the file that is named, if one is, less those of somebody else."""
    path = spoken.get("config") or variables.get("STOKER_CONFIG")
    found = read_config_file(Path(str(path))) if path else {}
    return {name: value for name, value in found.items() if name not in but}


def environment_for_workers(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are named, or whose names begin as said."""
    return {
        key: value
        for key, value in environ.items()
        if any(fnmatch.fnmatchcase(key, name) for name in names)
    }


def own_environment_for_workers(names: Sequence[str]) -> dict[str, str]:
    """The same of this process."""
    return environment_for_workers(names, os.environ)


def add_environment(variables: Mapping[str, str]) -> None:
    """Set those that this process does not have yet: what a node says of itself holds."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def address_of_node(known: str) -> str:
    """Where other nodes reach this one: what its environment says, else `known`.

    Raises:
        AddressError: the environment names what this node does not have.
    """
    return choose_address(
        known,
        address=os.environ.get(NODE_ADDRESS_VARIABLE, ""),
        interface=os.environ.get(INTERFACE_VARIABLE, ""),
        addresses_by_interface=own_addresses(),
    )
