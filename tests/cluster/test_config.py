"""Settings: one name everywhere, checked once, with errors that name them."""

import argparse
from pathlib import Path

import pytest

from cluster.config import (
    add_arguments,
    add_http_arguments,
    config_from,
    decode_config,
    encode_config,
    http_config_from,
    load_config,
    load_config_over,
    load_http_config,
)
from cluster.engine_config import EngineConfig
from cluster.http_config import HttpConfig
from scheduler.errors import ConfigError


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("max_num_seqs", 0, "max_num_seqs=0 is not possible: it must be an integer ≥ 1"),
        ("max_num_seqs", True, "max_num_seqs=True is not possible: it must be an integer"),
        ("max_num_seqs", "8", "max_num_seqs='8' is not possible: it must be an integer ≥ 1"),
        ("max_num_seq", 8, "there is no setting 'max_num_seq'. Did you mean max_num_seqs?"),
        ("backend", "k8s", "backend='k8s' is not possible: it must be one of local, ray"),
        ("gpu_memory_utilization", 1.5, "is not possible: it must be a number > 0, ≤ 1"),
        ("tensor_parallel_size", -1, "tensor_parallel_size=-1 is not possible"),
        ("num_kv_blocks", 0, "num_kv_blocks=0 is not possible"),
        ("watermark", 1.0, "watermark=1.0 is not possible"),
        ("max_plans_in_flight", 3, "max_plans_in_flight=3 is not possible"),
        ("step_timeout_s", 0.0, "step_timeout_s=0.0 is not possible"),
        ("drain_s", float("nan"), "drain_s=nan is not possible"),
        ("pin_cores", "no", "pin_cores='no' is not possible: it must be true or false"),
        ("zzz", 1, "there is no setting 'zzz'. `stoker serve --help` lists all"),
        ("front_address", "localhost", "front_address: an address starts with ipc:// or tcp://"),
        ("back_address", "tcp://localhost", "back_address: a TCP address looks like"),
        ("back_address", "tcp://0.0.0.0:0", "back_address=tcp://0.0.0.0:0 says no host"),
        ("log_level", "loud", "log_level='loud' is not possible: it must be one of debug,"),
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


def test_what_a_command_sets_by_itself_yields_to_everything(tmp_path: Path) -> None:
    path = tmp_path / "stoker.toml"
    path.write_text("drain_s = 3\n")

    own = {"drain_s": 9.0}

    assert load_config_over(own, parse(), {}).drain_s == 9.0
    assert load_config_over(own, parse("--drain-s", "0"), {}).drain_s == 0.0
    assert load_config_over(own, None, {"STOKER_CONFIG": str(path)}).drain_s == 3.0


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


def test_gpus_of_other_nodes_need_none_here() -> None:
    config = config_from({"device": "cuda", "ray_address": "auto"}).resolved(has_gpu=False)
    assert config.device == "cuda"
    assert config.max_num_batched_tokens == 2048


def test_settings_that_do_not_fit_together_are_refused_together() -> None:
    config = config_from({"max_num_seqs": 64, "max_num_batched_tokens": 16})
    with pytest.raises(ConfigError, match="max_num_batched_tokens=16 is below max_num_seqs=64"):
        config.resolved(has_gpu=False)


# --- HTTP -----------------------------------------------------------------------------------


def parse_http(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    add_http_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("port", 65536, "port=65536 is not possible: it must be an integer ≥ 0, ≤ 65535"),
        ("port", "http", "port='http' is not possible: it must be an integer"),
        ("api_server", 2, "there is no setting 'api_server'. Did you mean api_servers?"),
        ("max_num_seq", 2, "there is no setting 'max_num_seq'. Did you mean max_num_seqs?"),
        ("api_keys", "secret", "api_keys='secret' is not possible: it must be a list of texts"),
        ("api_keys", ["a", 5], "api_keys=['a', 5] is not possible: it must be a list of texts"),
        ("api_keys", ["a", ""], "api_keys holds an empty key"),
        ("unknown_fields", "drop", "it must be one of refuse, warn"),
        ("health_timeout_s", 0.0, "health_timeout_s=0.0 is not possible"),
    ],
)
def test_a_bad_value_of_http_is_refused_by_its_name(
    name: str, value: object, complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        http_config_from({name: value})
    assert complaint in str(caught.value)


def test_a_setting_has_one_owner() -> None:
    assert not set(EngineConfig.__struct_fields__) & set(HttpConfig.__struct_fields__)


def test_every_setting_of_http_is_an_option_of_the_same_name_or_its_singular() -> None:
    parser = argparse.ArgumentParser()
    add_http_arguments(parser)
    options = {action.dest: action.option_strings[0] for action in parser._actions}
    del options["help"]

    assert options.keys() == set(HttpConfig.__struct_fields__)
    for name, option in options.items():
        assert option in (f"--{name.replace('_', '-')}", f"--{name.replace('_', '-')[:-1]}")


def test_one_file_serves_both_and_each_overlooks_what_is_the_others(tmp_path: Path) -> None:
    path = tmp_path / "stoker.toml"
    path.write_text('max_num_seqs = 4\nport = 1234\napi_keys = ["from file"]\n')
    arguments = parse_http("--config", str(path), "--no-http")

    http = load_http_config(arguments, {})

    assert load_config(arguments, {}).max_num_seqs == 4
    assert (http.port, http.api_keys, http.http) == (1234, ("from file",), False)


def test_keys_come_from_a_file_the_environment_or_arguments_the_last_ones_holding(
    tmp_path: Path,
) -> None:
    path = tmp_path / "stoker.toml"
    path.write_text('api_keys = ["from file"]\n')
    environ = {"STOKER_CONFIG": str(path), "STOKER_API_KEY": "one, two"}

    assert load_http_config(parse_http(), environ).api_keys == ("one", "two")
    arguments = parse_http("--api-key", "three", "--api-key", "four")
    assert load_http_config(arguments, environ).api_keys == ("three", "four")
    del environ["STOKER_API_KEY"]
    assert load_http_config(parse_http(), environ).api_keys == ("from file",)


def test_an_unknown_setting_of_a_file_is_refused_whoever_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "stoker.toml"
    path.write_text("prot = 1234\n")
    for load in (load_config, load_http_config):
        with pytest.raises(ConfigError, match="there is no setting 'prot'"):
            load(parse("--config", str(path)), {})


def test_a_rays_address_and_a_backend_without_ray_exclude_each_other() -> None:
    assert config_from({"ray_address": "auto"}).backend == "ray"
    with pytest.raises(ConfigError, match="ray_address=auto is a Ray's, but backend=local starts"):
        config_from({"ray_address": "auto", "backend": "local"})
