"""`LLM` with a scripted cluster: what it starts, and that nothing of it stays."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cluster.config import config_from
from cluster.errors import ModelError, StartFailed
from scheduler.errors import ConfigError
from stoker import LLM, ClientClosed, EngineLost, SamplingParams
from stoker.cli import main
from stoker.cluster_process import ClusterProcess
from tests.cluster.frontend.fake_engine import ANSWER

ROOT = Path(__file__).resolve().parents[2]
LONG = SamplingParams(max_tokens=40)

pytestmark = pytest.mark.usefixtures("no_leaks")

UseCluster = Callable[[str], None]


def command(mode: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.stoker.fake_supervisor", mode)


@pytest.fixture
def use_cluster(monkeypatch: pytest.MonkeyPatch) -> UseCluster:
    """Let LLMs start a scripted cluster of some mode."""

    def use(mode: str) -> None:
        monkeypatch.setattr("stoker.cluster_process.SUPERVISOR_COMMAND", command(mode))
        monkeypatch.chdir(ROOT)

    use("ready")
    return use


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model until somebody loads it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def start_here(mode: str, **settings: float) -> ClusterProcess:
    return ClusterProcess(config_from({"stop_timeout_s": 0.1, **settings}), command(mode))


def test_it_generates_chats_and_ends(use_cluster: UseCluster, model: Path) -> None:
    with LLM(model) as llm:
        outputs = llm.generate(["one", "two"], LONG)
        (answer,) = llm.chat([{"role": "user", "content": "hi"}], LONG)
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.address.startswith("ipc://")

    assert [output.outputs[0].text for output in outputs] == [ANSWER, ANSWER]
    assert answer.outputs[0].text == ANSWER
    with pytest.raises(ClientClosed, match="Make a new LLM"):
        llm.generate("three")


def test_two_live_side_by_side(use_cluster: UseCluster, model: Path) -> None:
    with LLM(model) as one, LLM(model) as two:
        assert one.address != two.address
        assert one.generate("hi", LONG)[0].outputs[0].text == ANSWER
        one.close()
        assert two.generate("hi", LONG)[0].outputs[0].text == ANSWER


def test_dropping_it_ends_the_cluster(use_cluster: UseCluster, model: Path) -> None:
    llm = LLM(model)
    children = psutil.Process().children()
    assert children

    del llm

    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_a_cluster_that_ended_by_itself_is_named(use_cluster: UseCluster, model: Path) -> None:
    with LLM(model) as llm:
        (supervisor,) = psutil.Process().children()
        supervisor.kill()
        os.waitid(os.P_PID, supervisor.pid, os.WEXITED | os.WNOWAIT)

        with pytest.raises(EngineLost, match=r"killed by signal 9.*Make a new LLM"):
            llm.generate("hi")


def test_what_is_live_when_its_cluster_ends_does_not_wait_for_another(
    use_cluster: UseCluster, model: Path
) -> None:
    use_cluster("busy")
    with LLM(model, recovery_s=3600) as llm:
        handle = llm.client.submit("hi", LONG)
        (supervisor,) = psutil.Process().children()
        supervisor.kill()

        with pytest.raises(EngineLost, match="the cluster has ended"):
            handle.result(60.0)


def test_a_cluster_that_fails_says_why(use_cluster: UseCluster, model: Path) -> None:
    use_cluster("fails")

    with pytest.raises(StartFailed, match="port 9 is in use"):
        LLM(model)


def test_the_command_line_says_why_too(
    use_cluster: UseCluster, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_cluster("fails")

    assert main(["generate", str(model), "--prompt", "x"]) == 1
    assert capsys.readouterr().err == "stoker: error: port 9 is in use\n"


def test_the_command_line_starts_a_cluster_and_ends_it(
    use_cluster: UseCluster, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(model), "--prompt", "x", "--max-num-seqs", "3"]) == 0
    assert ANSWER.strip() in capsys.readouterr().out


@pytest.mark.parametrize(("mode", "says"), [("dies", "exit code 3"), ("babbles", "its log says")])
def test_a_cluster_that_says_nothing_sensible_is_an_error(mode: str, says: str) -> None:
    cluster = start_here(mode)

    with pytest.raises(StartFailed, match=says):
        cluster.wait_ready()

    assert not cluster.is_alive


def test_the_wait_for_a_cluster_is_bounded_and_names_the_limit() -> None:
    cluster = start_here("silent", start_timeout_s=0.1)

    with pytest.raises(StartFailed, match=r"not ready within 0\.1 s.*start_timeout_s"):
        cluster.wait_ready()

    assert not cluster.is_alive


def test_a_cluster_that_does_not_end_is_killed() -> None:
    cluster = start_here("stubborn", start_timeout_s=60)
    cluster.wait_ready()

    cluster.end()
    cluster.end()

    assert cluster.wait() == "killed by signal 9"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_num_seq": 5}, "max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"tensor_parallel_size": "two"}, "tensor_parallel_size"),
        ({"dtype": "float8"}, "float16"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"data_parallel_size": 0}, "num_groups"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    settings: dict[str, str | float], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM("/nowhere", **settings)


def test_a_model_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(ModelError, match="/nowhere/at/all"):
        LLM("/nowhere/at/all")


@pytest.mark.parametrize("wrong", [{"model": "/nowhere"}, {"max_num_seqs": "many"}], ids=str)
def test_a_wrong_call_shows_the_callers_line_and_what_was_wrong(wrong: dict[str, str]) -> None:
    with pytest.raises((ConfigError, ModelError)) as caught:
        LLM(**wrong)

    assert len(traceback.extract_tb(caught.value.__traceback__)) == 2  # this test's, and ours
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_program_ends_the_cluster_ends(model: Path, how: signal.Signals) -> None:
    program = (
        "import stoker.cluster_process as c, sys, threading\n"
        f"c.SUPERVISOR_COMMAND = {command('ready')!r}\n"
        "from stoker import LLM\n"
        f"llm = LLM({str(model)!r})\n"
        "print(llm.generate('hi')[0].outputs[0].finish_reason, flush=True)\n"
        "threading.Event().wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"length\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        os.kill(process.pid, how)
        process.wait(20)

    assert psutil.wait_procs(children, timeout=20)[1] == []
