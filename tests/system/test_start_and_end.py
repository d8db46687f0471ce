"""Clusters come up or say why not, and leave nothing: statement 7; cases 62, 64, 66, 67, 72, 117.

`tests/cluster/test_supervisor.py` tries the same with scripted workers in many more ways.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster.errors import ModelError, StartFailed
from stoker import LLM, EngineLost, InvalidRequest, RequestError
from tests.leaks import Footprint
from tests.system.served import greedy, settled, text_of, tokens_of
from tests.worker.tiny_models import save_model

LOCAL = {"backend": "local", "log_level": "warning"}
IDS = {"prompt_token_ids": [5, 6, 7]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, folder = save_model("llama", tmp_path_factory.mktemp("tiny"))
    return folder


@pytest.fixture(autouse=True)
def _nothing_is_left(no_leaks: None) -> Iterator[None]:
    """Neither processes, nor shared memory, nor sockets and their folders."""
    before = our_folders()
    yield
    assert our_folders() - before == set()


def our_folders() -> set[str]:
    """Less the one that lists this user's clusters, which stays."""
    return {
        path.name
        for path in Path(tempfile.gettempdir()).glob("stoker-*")
        if path.name != f"stoker-{os.getuid()}" and not is_held_by_others(path)
    }


def is_held_by_others(folder: Path) -> bool:
    """Whether its owner is no descendant of ours: other clusters run on this machine."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        try:
            if any(file.path.startswith(f"{folder}/") for file in process.open_files()):
                return process.pid not in ours
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return False


def failure(model: object, **settings: object) -> str:
    """Why a cluster with these settings does not come up."""
    began = time.monotonic()
    with pytest.raises((ModelError, StartFailed)) as caught:
        LLM(model, **LOCAL | settings).close()
    assert time.monotonic() - began < 60.0
    return str(caught.value)


def test_an_unknown_model_is_refused_by_its_name() -> None:
    assert "no-such-model" in failure("./no-such-model")


def test_damaged_weights_are_named(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    assert "model.safetensors" in failure(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "garbage", "missing"])
def test_weights_damaged_in_other_ways_are_named(damage: str, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"" if damage == "empty" else b"\xff" * 1000)
    if damage == "missing":
        weights.unlink()

    assert "safetensors" in failure(tmp_path)


def test_case_117_a_tensor_parallel_size_that_cannot_work_is_refused_with_those_that_do(
    tiny: Path,
) -> None:
    message = failure(tiny, tensor_parallel_size=4)
    assert "4" in message
    for legal in ("1", "2", "3"):
        assert legal in message


@pytest.mark.model
@pytest.mark.slow
def test_case_72_a_budget_below_one_request_is_refused_with_the_least_that_would_do(
    smollm2: Path,
) -> None:
    message = failure(smollm2, kv_cache_memory_bytes=1 << 20)
    assert "1.0 MiB are left" in message
    assert f"kv_cache_memory_bytes to at least {8192 * 46_080}" in message
    assert "max_model_len=8192" in message


def test_a_port_in_use_is_refused_by_its_number(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in failure(tiny, front_address=f"tcp://127.0.0.1:{port}")


@pytest.mark.slow
@pytest.mark.ray
def test_case_105_more_ranks_than_ray_has_room_for_are_refused_with_what_it_has(tiny: Path) -> None:
    num_groups = (os.cpu_count() or 1) + 1
    message = failure(tiny, backend="ray", tensor_parallel_size=3, num_groups=num_groups)
    asked = rf"asked for {3 * num_groups} CPU .*, there are \d+ of \d+ CPU free"
    assert re.search(asked, message)
    assert re.search(r"Nodes:\n +[\d.]+ \w+: \d+ of \d+ CPU free", message)
    assert "tensor_parallel_size" in message


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.model
def test_ray_actors_answer_as_local_processes_do_and_leave_nothing(smollm2: Path) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    settings = {"tensor_parallel_size": 2, "max_model_len": 512, "log_level": "warning"}
    with LLM(smollm2, backend="ray", **settings) as llm:
        (output,) = llm.chat(question, greedy(20), use_tqdm=False)
    assert text_of(output) == "The capital of France is Paris."


def test_a_model_without_a_tokenizer_answers_ids_and_refuses_texts(tiny: Path) -> None:
    with LLM(tiny, max_num_seqs=8, **LOCAL) as llm:
        (output,) = llm.generate(IDS, greedy(4, ignore_eos=True), use_tqdm=False)
        assert len(tokens_of(output)) == 4
        assert text_of(output) == ""
        with pytest.raises(InvalidRequest, match="tokenizer"):
            llm.generate("a text", greedy(4), use_tqdm=False)
        with pytest.raises(InvalidRequest, match="tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)


@pytest.mark.slow
def test_case_66_five_starts_two_of_which_fail_leave_nothing(tiny: Path) -> None:
    before = Footprint.now()
    for at in range(5):
        if at % 2:
            assert failure(tiny, tensor_parallel_size=4)
        else:
            with LLM(tiny, tensor_parallel_size=2, max_num_seqs=8, **LOCAL) as llm:
                llm.generate(IDS, greedy(2), use_tqdm=False)
        assert before.leftovers() == []


def serve(model: Path, *more: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "stoker.cli",
            "serve",
            str(model),
            "--backend=local",
            "--port=0",
            *more,
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


SIGNALS = [
    pytest.param(signal.SIGINT, 1.0, id="Ctrl-C after 1 s"),
    *(
        pytest.param(number, after_s, id=f"{number.name} after {after_s:g} s", marks=[slow])
        for slow in [pytest.mark.slow]
        for number in (signal.SIGINT, signal.SIGTERM)
        for after_s in (0.2, 0.5, 2.0, 5.0, 9.0)
    ),
]


@pytest.mark.model
@pytest.mark.parametrize(("number", "after_s"), SIGNALS)
def test_case_64_a_signal_while_it_starts_ends_everything_soon(
    number: signal.Signals, after_s: float, smollm2: Path
) -> None:
    process = serve(smollm2, "--tensor-parallel-size", "2")
    with process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(after_s)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        # Killed by it: the interpreter had not come to our first line yet.
        assert process.wait(20.0) in (0, 130, 143, -number)
    _, alive = psutil.wait_procs(family, timeout=10.0)
    assert alive == []


@pytest.mark.slow
@pytest.mark.model
def test_a_term_signal_lets_streams_end_within_the_drain(smollm2: Path) -> None:
    with LLM(smollm2, tensor_parallel_size=2, drain_s=60.0, max_model_len=1024, **LOCAL) as llm:
        handles = [
            llm.client.submit(f"{at},", greedy(40, ignore_eos=True, logprobs=0)) for at in range(4)
        ]
        for handle in handles:
            next(iter(handle))
        supervisor_of(llm).terminate()
        assert [len(tokens_of(handle.result(60.0))) for handle in handles] == [40] * 4


def supervisor_of(llm: LLM) -> psutil.Process:
    worker = llm.client.status().groups[0].ranks[0].pid
    return psutil.Process(worker).parent()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("rank", [0, 2])
def test_case_62_a_killed_rank_ends_all_requests_with_a_reason(rank: int, smollm2: Path) -> None:
    settings = {"max_model_len": 1024, "max_restarts": 0}
    with LLM(smollm2, tensor_parallel_size=3, **settings, **LOCAL) as llm:
        handles = [llm.client.submit(f"{at},", greedy(900, ignore_eos=True)) for at in range(8)]
        for handle in handles:
            next(iter(handle))
        os.kill(llm.client.status().groups[0].ranks[rank].pid, signal.SIGKILL)
        began = time.monotonic()
        for handle in handles:
            assert ended_badly(handle.result)
        assert time.monotonic() - began < 10.0


@pytest.mark.slow
@pytest.mark.model
def test_case_67_a_frozen_rank_ends_all_requests_within_the_step_limit(smollm2: Path) -> None:
    settings = {"max_model_len": 1024, "step_timeout_s": 4.0, "max_restarts": 0}
    with LLM(smollm2, tensor_parallel_size=2, **settings, **LOCAL) as llm:
        handles = [llm.client.submit(f"{at},", greedy(900, ignore_eos=True)) for at in range(4)]
        for handle in handles:
            next(iter(handle))
        frozen = llm.client.status().groups[0].ranks[1].pid
        os.kill(frozen, signal.SIGSTOP)
        began = time.monotonic()
        for handle in handles:
            assert ended_badly(handle.result)
        assert time.monotonic() - began < 15.0


def ended_badly(result: Callable[[], object]) -> bool:
    """Whether the request ended with an error of ours, and the error says something."""
    try:
        output = result()
    except (EngineLost, RequestError) as error:
        return bool(str(error))
    (only,) = output.outputs  # type: ignore[attr-defined]
    return only.finish_reason in ("error", "abort") and len(only.token_ids) < 900


@pytest.mark.slow
def test_an_idle_cluster_uses_next_to_no_cpu(tiny: Path) -> None:
    """Under 2% of a core for the engine, and as little for each other process of the cluster."""
    with LLM(tiny, tensor_parallel_size=2, max_num_seqs=8, **LOCAL) as llm:
        llm.generate([IDS] * 8, greedy(16, ignore_eos=True), use_tqdm=False)
        settled(llm.client)
        supervisor = supervisor_of(llm)
        family = [supervisor, *supervisor.children(recursive=True)]
        assert len(family) == 4
        assert llm.address.startswith("ipc://")
        listening = [one for each in family for one in each.net_connections("inet")]
        assert listening == [], "case 129: nothing is open to the network unless asked for"

        def cpu_s(process: psutil.Process) -> float:
            times = process.cpu_times()
            return times.user + times.system

        before = [cpu_s(process) for process in family]
        with pytest.raises(psutil.TimeoutExpired):
            supervisor.wait(5.0)
        used = [cpu_s(process) - was for process, was in zip(family, before, strict=True)]
        assert max(used) < 0.02 * 5.0, used
