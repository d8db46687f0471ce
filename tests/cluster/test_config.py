"""Settings: one name everywhere, checked once, with errors that name them."""

import argparse
from pathlib import Path

import pytest

from cluster.config import (
    EngineConfig,
    add_arguments,
    config_from,
    decode_config,
    encode_config,
    load_config,
)
from scheduler.errors import ConfigError


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("max_num_seqs", 0, "max_num_seqs=0 is not possible: expected `int` >= 1"),
        ("max_num_seqs", True, "max_num_seqs=True is not possible: expected `int`, got `bool`"),
        ("max_num_seqs", "8", "max_num_seqs='8' is not possible: expected `int`, got `str`"),
        ("max_num_seq", 8, "there is no setting 'max_num_seq'. Did you mean max_num_seqs?"),
        ("backend", "k8s", "backend='k8s' is not possible: expected one of ray, local"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization=1.5 is not possible: expected"),
        ("tensor_parallel_size", -1, "tensor_parallel_size=-1 is not possible"),
        ("num_kv_blocks", 0, "num_kv_blocks=0 is not possible"),
        ("watermark", 1.0, "watermark=1.0 is not possible"),
        ("max_plans_in_flight", 3, "max_plans_in_flight=3 is not possible"),
        ("step_timeout_s", 0.0, "step_timeout_s=0.0 is not possible"),
        ("drain_s", float("nan"), "drain_s=nan is not possible"),
        ("front_address", "localhost", "front_address: an address starts with ipc:// or tcp://"),
        ("back_address", "tcp://localhost", "back_address: a TCP address looks like"),
        ("back_address", "tcp://0.0.0.0:0", "back_address=tcp://0.0.0.0:0 says no host"),
        ("log_level", "loud", "log_level='loud' is not possible: expected one of debug, info"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(name: str, value: object, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from({name: value})
    assert complaint in str(caught.value)


def test_none_and_absent_mean_the_default() -> None:
    assert config_from({"max_num_seqs": None, "model": None}) == EngineConfig()


def test_a_path_is_taken_as_text() -> None:
    assert config_from({"model": Path("/models/tiny")}).model == "/models/tiny"


def test_every_setting_but_the_model_is_an_option_with_the_same_name() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = {action.dest for action in parser._actions} - {"help", "config"}

    assert options == set(EngineConfig.__struct_fields__) - {"model"}
    assert all(action.help for action in parser._actions)


def test_arguments_become_settings() -> None:
    config = load_config(
        parse("--max-num-seqs", "8", "--no-pin-cores", "--backend", "local", "--drain-s", "2"), {}
    )

    assert (config.max_num_seqs, config.pin_cores, config.backend) == (8, False, "local")
    assert config.drain_s == 2.0


def test_file_environment_arguments_and_keywords_hold_in_this_order(tmp_path: Path) -> None:
    path = tmp_path / "stoker.toml"
    path.write_text('log_level = "debug"\nmodels_dir = "file"\nmax_num_seqs = 4\nblock_size = 8\n')
    environ = {"STOKER_CONFIG": str(path), "STOKER_MODELS_DIR": "env", "STOKER_LOG_LEVEL": "error"}

    config = load_config(parse("--max-num-seqs", "5", "--log-level", "warning"), environ, model="m")

    assert config.block_size == 8
    assert config.models_dir == "env"
    assert config.log_level == "warning"
    assert config.max_num_seqs == 5
    assert config.model == "m"


def test_the_file_of_an_argument_wins_over_the_one_of_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "stoker.toml"
    path.write_text("max_num_seqs = 4\n")
    config = load_config(parse("--config", str(path)), {"STOKER_CONFIG": "/nowhere"})
    assert config.max_num_seqs == 4


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"max_num_seqs =", "is not a TOML file"),
        (b"\xff\xfe", "is not a TOML file"),
        (b"[section]\nx = 1\n", "there is no setting 'section'"),
        (b"max_num_seqs = 'many'", "max_num_seqs='many' is not possible"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "stoker.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        load_config(parse("--config", str(path)), {})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config file /no/such.toml: No such file"):
        load_config(parse("--config", "/no/such.toml"), {})


def test_settings_travel_as_json() -> None:
    config = config_from({"max_num_seqs": 3, "watermark": 0.5, "num_kv_blocks": 12})
    assert decode_config(encode_config(config)) == config


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff"])
def test_anything_else_is_not_settings(data: bytes) -> None:
    with pytest.raises(ConfigError, match="not a JSON object"):
        decode_config(data)


def test_the_device_and_the_size_of_a_step_follow_from_the_host() -> None:
    assert config_from({}).resolved(has_gpu=False).device == "cpu"
    assert config_from({}).resolved(has_gpu=True).device == "cuda"
    assert config_from({}).resolved(has_gpu=False).max_num_batched_tokens == 512
    assert config_from({"device": "cpu"}).resolved(has_gpu=True).device == "cpu"
    many = config_from({"max_num_seqs": 1024}).resolved(has_gpu=False)
    assert many.max_num_batched_tokens == 1024


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        config_from({"device": "cuda"}).resolved(has_gpu=False)


def test_settings_that_do_not_fit_together_are_refused_together() -> None:
    config = config_from({"max_num_seqs": 64, "max_num_batched_tokens": 16})
    with pytest.raises(ConfigError, match="max_num_batched_tokens=16 is below max_num_seqs=64"):
        config.resolved(has_gpu=False)
