"""The engine process is killed while the real model answers: every answer is what it would be."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from cluster.messages.faults import Fault, InjectFault
from scheduler.structured import StructuredOutputs
from stoker import LLM, Client, RequestOutput, SamplingParams
from stoker.chaos.link import ChaosLink
from stoker.client import Handle
from tests.system.served import greedy, settled
from tests.worker.tiny_models import save_model

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = (
    "The first thing that a stoker does in the morning",
    "Once upon a time there was a boiler that",
    "A list of ten rivers: ",
    "def fibonacci(n):",
)
ASKED: tuple[SamplingParams, ...] = (
    greedy(64, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=64, ignore_eos=True),
    greedy(48, repetition_penalty=1.2, logprobs=2, ignore_eos=True),
    greedy(48, structured_outputs=StructuredOutputs(regex="([a-z]{3,9} ){12}[a-z]+")),
)


def engine_of(client: Client) -> psutil.Process:
    """The engine's process, among this process's descendants that serve the client's address."""
    folder = client.address.removeprefix("ipc://").rpartition("/")[0]
    return next(
        child
        for child in psutil.Process().children(recursive=True)
        if "cluster.engine_main" in child.cmdline()
        and any(folder in connection.laddr for connection in child.net_connections("unix"))
    )


def pids(client: Client) -> list[int]:
    return [rank.pid for group in client.status().groups for rank in group.ranks]


def begin(client: Client) -> list[Handle]:
    return [client.submit(prompt, asked) for prompt, asked in zip(PROMPTS, ASKED, strict=True)]


def wait_for_tokens(handles: Sequence[Handle], count: int) -> None:
    """Until each has so many tokens."""
    for handle in handles:
        while len(handle.snapshot().outputs[0].token_ids) < count:
            assert not handle.is_done
            time.sleep(0.01)


def said(outputs: Sequence[RequestOutput]) -> list[tuple[str, list[int], str | None]]:
    return [
        (only.text, only.token_ids, only.finish_reason)
        for output in outputs
        for only in output.outputs
    ]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_answers_go_on_with_the_same_tokens_when_the_engine_is_killed_twice(
    smollm2: Path, num_groups: int, no_leaks: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of greedy, sampled, edited and guided answers. Nothing is loaded again."""
    with LLM(
        smollm2,
        backend="local",
        tensor_parallel_size=2,
        num_groups=num_groups,
        max_model_len=1024,
        num_kv_blocks=256,
        log_level="info",
    ) as llm:
        client = llm.client
        undisturbed = said([handle.result(500.0) for handle in begin(client)])
        workers = pids(client)
        handles = begin(client)
        for number, tokens in ((1, 4), (2, 16)):
            wait_for_tokens(handles, tokens)
            engine_of(client).kill()
            wait_for_tokens(handles, tokens + 2)
            assert client.status().num_engine_restarts == number
        outputs = [handle.result(500.0) for handle in handles]

        assert said(outputs) == undisturbed
        assert pids(client) == workers
        assert [group.epoch for group in settled(client).groups] == [1] * num_groups
    log = capfd.readouterr().err
    assert log.count("was_loaded=False") == len(workers)
    assert log.count("engine_recovered") == 2


ENDS_OF_666 = """
import os, sys
if "cluster.engine_main" in sys.orig_argv:
    from scheduler.scheduler import Scheduler
    submit = Scheduler.submit
    def submit_or_die(self, request, client, now):
        if 666 in request.prompt:
            os.kill(os.getpid(), 11)
        return submit(self, request, client, now)
    Scheduler.submit = submit_or_die
"""
"""An engine process dies of a prompt with this token, as it would of a defect of a library."""


def test_a_request_of_which_engines_die_is_refused_after_the_third_and_the_others_go_on(
    smollm2: Path, tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ENDS_OF_666)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with LLM(
        smollm2,
        backend="local",
        max_model_len=1024,
        num_kv_blocks=256,
        recovery_s=600.0,
        log_level="warning",
    ) as llm:
        client = llm.client
        undisturbed = said([handle.result(500.0) for handle in begin(client)])
        handles = begin(client)
        wait_for_tokens(handles, 1)
        poison = client.submit([5, 6, 666, 7], greedy(8)).result(500.0)
        outputs = [handle.result(500.0) for handle in handles]

        assert poison.outputs[0].finish_reason == "error"
        assert said(outputs) == undisturbed
        assert client.status().num_engine_restarts == 3


def test_a_rank_that_waits_for_one_that_was_told_less_costs_the_group_a_restart(
    tmp_path: Path, no_leaks: None
) -> None:
    """As when the engine ends between the sendings of one plan to two ranks."""
    _, folder = save_model("llama", tmp_path)
    with LLM(
        folder,
        backend="local",
        tensor_parallel_size=2,
        num_kv_blocks=64,
        max_plans_in_flight=1,
        allow_chaos=True,
        recovery_s=600.0,
        log_level="warning",
    ) as llm:
        client = llm.client
        prompt, asked = [5, 6, 7], greedy(60, ignore_eos=True)
        undisturbed = client.submit(prompt, asked).result(120.0)
        with ChaosLink(client.address, key_file=llm.key_file) as chaos:
            chaos.inject(InjectFault(fault=Fault(kind="miss"), group=0, rank=1))
        handle = client.submit(prompt, asked)
        time.sleep(1.0)  # rank 0 is in its collective, and nothing that ends by itself would come
        engine_of(client).kill()
        output = handle.result(240.0)

        assert said([output]) == said([undisturbed])
        (group,) = settled(client).groups
        assert (group.epoch, client.status().num_engine_restarts) == (2, 1)
        assert "rank" in group.message


def test_actors_of_ray_outlive_the_engine(tmp_path: Path, no_leaks: None) -> None:
    _, folder = save_model("llama", tmp_path)
    with LLM(
        folder,
        backend="ray",
        tensor_parallel_size=2,
        num_kv_blocks=64,
        allow_chaos=True,
        recovery_s=600.0,
        log_level="warning",
    ) as llm:
        client = llm.client
        prompt, asked = [5, 6, 7], greedy(60, ignore_eos=True)
        undisturbed = client.submit(prompt, asked).result(120.0)
        workers = pids(client)
        with ChaosLink(client.address, key_file=llm.key_file) as chaos:
            chaos.inject(InjectFault(fault=Fault(kind="slow", seconds=0.05, count=60), group=0))
        handle = client.submit(prompt, asked)
        wait_for_tokens([handle], 5)
        engine_of(client).kill()
        output = handle.result(240.0)

        assert said([output]) == said([undisturbed])
        assert pids(client) == workers
        assert [group.epoch for group in settled(client).groups] == [1]
