"""Weights that a host keeps: read once, mapped by every rank that wants the same, bit by bit."""

import os
import signal
import time
from pathlib import Path

import pytest

from cluster.messages.reports import RankStatus
from stoker import LLM
from tests.system.served import greedy, tokens_of
from tests.worker.tiny_models import save_model

pytestmark = pytest.mark.usefixtures("no_leaks")

PROMPTS = [{"prompt_token_ids": list(range(1, 2 + 7 * n))} for n in range(1, 7)]
GROUPS, RANKS = 2, 2
RESTART_WAIT_S = 60.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("tiny"))[1]


def start(model: Path, **settings: object) -> LLM:
    defaults = {
        "backend": "local",
        "num_kv_blocks": 64,
        "tensor_parallel_size": RANKS,
        "max_restarts": 3,
        "log_level": "info",
    }
    return LLM(model, **{**defaults, **settings})


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, greedy(24, ignore_eos=True), use_tqdm=False)
    return [list(tokens_of(output)) for output in outputs]


def ranks_of(llm: LLM) -> list[RankStatus]:
    return [rank for group in llm.client.status().groups for rank in group.ranks]


def how_they_loaded(log: str) -> list[str]:
    """`read` or `mapped`, of each rank that has loaded, in the order of the log."""
    return [
        word.partition("=")[2]
        for line in log.splitlines()
        if "[worker " in line and "worker_loaded" in line and "it last wrote" not in line
        for word in line.split()
        if word.startswith("weights=")
    ]


def weight_mapping(pid: int) -> tuple[int, int, str]:
    """Of the kept weights in a process: resident bytes, its share of them, and its access."""
    resident = share = 0
    access = ""
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            inside = "memfd:stoker-weights" in line
            access = rest[0] if inside else access
        elif inside and name == "Rss:":
            resident += int(rest[0]) * 1024
        elif inside and name == "Pss:":
            share += int(rest[0]) * 1024
    return resident, share, access


def wait_for_epoch(llm: LLM, group: int, epoch: int) -> None:
    deadline = time.monotonic() + RESTART_WAIT_S
    while time.monotonic() < deadline:
        found = llm.client.status().groups[group]
        if (found.epoch, found.state) == (epoch, "ready"):
            return
        time.sleep(0.1)
    raise AssertionError(f"group {group} is {found.state} at epoch {found.epoch}")


@pytest.mark.slow
def test_a_rank_that_was_killed_comes_back_with_the_weights_of_the_one_before(
    tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with start(tiny, num_groups=1, warm_weights=False) as llm:
        expected = answers(llm)
    assert how_they_loaded(capfd.readouterr().err) == ["read", "read"]

    with start(tiny, num_groups=GROUPS) as llm:
        assert answers(llm) == expected
        log = capfd.readouterr().err
        assert sorted(how_they_loaded(log)) == ["mapped", "mapped", "read", "read"]
        assert log.count("weights_kept") == RANKS
        check_that_groups_share(llm)

        os.kill(llm.client.status().groups[0].ranks[1].pid, signal.SIGKILL)
        wait_for_epoch(llm, 0, 2)

        assert how_they_loaded(capfd.readouterr().err) == ["mapped"] * RANKS
        assert answers(llm) == expected
        check_that_groups_share(llm)


def test_the_last_group_of_a_host_finds_its_weights_again_when_all_of_it_was_killed(
    tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with start(tiny, num_groups=1) as llm:
        expected = answers(llm)
        capfd.readouterr()
        for rank in ranks_of(llm):
            os.kill(rank.pid, signal.SIGKILL)
        wait_for_epoch(llm, 0, 2)

        assert how_they_loaded(capfd.readouterr().err) == ["mapped"] * RANKS
        assert answers(llm) == expected


@pytest.mark.slow
@pytest.mark.ray
def test_ray_actors_share_and_find_again_what_their_host_keeps(tiny: Path) -> None:
    """Their log comes too late to be read: what they have mapped says the same."""
    settings = {"backend": "ray", "tensor_parallel_size": 1, "num_groups": GROUPS}
    with start(tiny, **settings) as llm:
        expected = answers(llm)
        check_that_groups_share(llm)

        os.kill(ranks_of(llm)[0].pid, signal.SIGKILL)
        wait_for_epoch(llm, 0, 2)

        assert answers(llm) == expected
        check_that_groups_share(llm)


def check_that_groups_share(llm: LLM) -> None:
    for rank in ranks_of(llm):
        resident, share, access = weight_mapping(rank.pid)
        assert resident >= rank.weight_bytes
        assert share <= resident / GROUPS + 4096
        assert access == "r--p"
