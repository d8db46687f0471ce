"""The only place that reads files, arguments and the environment for settings, and checks them.

Settings are fields of `EngineConfig` and `HttpConfig`. One has one name everywhere:
`LLM(max_num_seqs=8)`, `max_num_seqs = 8` in a TOML file, `--max-num-seqs 8`. What is given last in
this order holds: default, file, environment, argument. Values are checked once, here; measured
ones are never written back.
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
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from cluster.engine_config import EngineConfig
from cluster.errors import AddressError
from cluster.http_config import HttpConfig
from cluster.links.addresses import check_address, is_wildcard
from cluster.node_address import choose_address, own_addresses
from cluster.setting import add_options, words_or_bounds
from scheduler.errors import ConfigError

GPU_MARK = Path("/proc/driver/nvidia/version")
"""Exists where NVIDIA's driver is loaded."""

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
