"""Whole clusters of processes, with scripted workers: they come up, end, and leave nothing."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from cluster.announcements import ClusterFailed, ClusterReady, OfCluster, read_cluster_line
from cluster.config import config_from, encode_config
from cluster.errors import LinkLost
from cluster.keys import read_key_file
from cluster.messages.reports import EngineMetrics, MetricsRequest, Status
from cluster.start_phases import PHASES
from scheduler.request import Finish
from tests.cluster.cluster_rig import TestClient, wait_for_status
from tests.cluster.scripted import tokens_after

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


class ClusterProcess:
    """One `scripted_cluster` process, its log, and every process that it ever had."""

    def __init__(self, folder: Path, script: object = None, **settings: object) -> None:
        self.folder = folder
        if script is not None:
            (folder / "script.json").write_text(json.dumps(script))
        values = {
            "model": str(folder),
            "backend": "local",
            "socket_dir": str(folder),
            "max_num_seqs": 8,
            "start_timeout_s": 60.0,
            **settings,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.scripted_cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            process_group=0,
        )
        self.log: list[str] = []
        self._seen = threading.Condition()
        self._family: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        assert self.process.stdin is not None
        self.process.stdin.write(encode_config(config_from(values)) + b"\n")
        self.process.stdin.flush()
        self.client: TestClient | None = None

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._seen:
                self.log.append(line.decode().rstrip())
                self._remember_family()
                self._seen.notify_all()

    def _remember_family(self) -> None:
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._family[child.pid] = child
        except psutil.NoSuchProcess:
            return

    def wait_for(self, event: str) -> str:
        """The first line of the log with this in it."""
        with self._seen:
            assert self._seen.wait_for(
                lambda: any(event in line for line in self.log), timeout=WAIT_S
            ), self.text
            return next(line for line in self.log if event in line)

    @property
    def text(self) -> str:
        return "\n".join(self.log)

    def announced(self) -> OfCluster:
        assert self.process.stdout is not None
        return read_cluster_line(self.process.stdout.readline())

    def up(self) -> TestClient:
        """Wait until it is ready; a client that has said hello."""
        ready = self.announced()
        assert isinstance(ready, ClusterReady), ready
        self.key_file = Path(ready.key_file) if ready.key_file else None
        keys = None if self.key_file is None else read_key_file(self.key_file)
        self.client = TestClient(ready.front_address, keys)
        self.client.hello()
        self._remember_family()
        return self.client

    def pids(self, status: Status) -> list[int]:
        return [rank.pid for group in status.groups for rank in group.ranks]

    def engine(self) -> psutil.Process:
        self._remember_family()
        return next(
            child
            for child in self._family.values()
            if child.is_running() and "cluster.engine_main" in " ".join(child.cmdline())
        )

    def end(self) -> int:
        """Close its standard input, as the end of its parent would; the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def check_nothing_is_left(self) -> None:
        deadline = time.monotonic() + WAIT_S
        for child in self._family.values():
            assert is_over(child, deadline), f"{child} is left\n{self.text}"
        left = [path.name for path in self.folder.glob("stoker-*")]
        assert left == [], self.text

    def kill(self) -> None:
        """For whatever a failed test left."""
        if self.client is not None:
            self.client.close()
        self._remember_family()
        for process in (self.process, *self._family.values()):
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def is_over(process: psutil.Process, deadline: float) -> bool:
    """Whether a process that is not our child ends in time; an unreaped one has ended."""
    while time.monotonic() < deadline:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            process.wait(0.05)
            return True
        except psutil.TimeoutExpired:
            continue
        except psutil.NoSuchProcess:
            return True
    return False


@pytest.fixture
def clusters() -> Iterator["Clusters"]:
    clusters = Clusters()
    yield clusters
    clusters.clear()


class Clusters:
    """Starts clusters in short folders of their own, and clears them away."""

    def __init__(self) -> None:
        self.all: list[ClusterProcess] = []

    def start(self, script: object = None, **settings: object) -> ClusterProcess:
        folder = Path(tempfile.mkdtemp(prefix="stoker-test-"))
        cluster = ClusterProcess(folder, script, **settings)
        self.all.append(cluster)
        return cluster

    def clear(self) -> None:
        for cluster in self.all:
            cluster.kill()
            shutil.rmtree(cluster.folder, ignore_errors=True)


def test_a_cluster_comes_up_answers_and_goes_without_a_trace(clusters: Clusters) -> None:
    cluster = clusters.start(tensor_parallel_size=2)
    client = cluster.up()
    client.finish(handle := client.submit(num_prompt=10, max_tokens=20))

    assert client.tokens[handle] == tokens_after(10, 20)
    assert cluster.end() == 0
    cluster.check_nothing_is_left()
    for phase in ("backend_open", "group_started", "engine_listens", "cluster_ready"):
        assert len(re.findall(rf"supervisor {phase} after_s=", cluster.text)) == 1


def test_case_136_each_phase_of_a_start_is_logged_once_and_exported_and_they_add_up(
    clusters: Clusters,
) -> None:
    launched = time.monotonic()
    cluster = clusters.start(tensor_parallel_size=2)
    client = cluster.up()
    took_s = time.monotonic() - launched
    client.send(MetricsRequest())
    samples = client.next_of(EngineMetrics).values["start_seconds"]
    cluster.end()

    (line,) = re.findall(r"start_phases (.*)", cluster.text)
    logged = re.findall(r"(\w+)=(\S+)", line)
    assert tuple(phase for phase, _ in logged) == PHASES
    assert [sample.labels for sample in samples] == [(phase,) for phase in PHASES]
    assert [s.value for s in samples] == pytest.approx([float(s) for _, s in logged], rel=1e-3)
    assert sum(sample.value for sample in samples) == pytest.approx(took_s, rel=0.1, abs=0.3)


@pytest.mark.slow
def test_six_clusters_start_at_once_each_with_its_own_addresses(clusters: Clusters) -> None:
    six = [
        clusters.start(front_address="tcp://127.0.0.1:0", back_address="tcp://127.0.0.1:0")
        for _ in range(6)
    ]
    addresses = set()
    for cluster in six:
        client = cluster.up()
        addresses.add(client.link.address)
        client.finish(handle := client.submit())
        assert client.tokens[handle] == tokens_after(4, 5)
    assert len(addresses) == 6
    for cluster in six:
        cluster.process.send_signal(signal.SIGTERM)
    for cluster in six:
        assert cluster.wait() == 0
        cluster.check_nothing_is_left()


def test_tcp_sockets_are_encrypted_unless_said_otherwise_and_open_to_the_key_file_only(
    clusters: Clusters,
) -> None:
    tcp = {"front_address": "tcp://127.0.0.1:0", "back_address": "tcp://127.0.0.1:0"}
    cluster = clusters.start(**tcp)
    client = cluster.up()
    client.finish(handle := client.submit())
    assert client.tokens[handle] == tokens_after(4, 5)
    assert cluster.key_file is not None
    assert stat.S_IMODE(cluster.key_file.stat().st_mode) == 0o600
    assert cluster.key_file.parent.parent == cluster.folder

    stranger = TestClient(client.link.address)
    with pytest.raises(LinkLost, match=r"encrypted.* dialled without a key"):
        stranger.link.wait_connected(10.0)
    stranger.close()
    cluster.wait_for("connections_turned_away")
    assert client.status().totals.num_turned_away >= 1  # it dials again until it is closed
    secret = read_key_file(cluster.key_file).secret
    assert cluster.end() == 0
    assert secret not in cluster.text
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_a_wished_key_file_is_written_and_goes_with_the_cluster(
    clusters: Clusters, tmp_path: Path
) -> None:
    wished = tmp_path / "mine.key"
    cluster = clusters.start(front_address="tcp://127.0.0.1:0", key_file=str(wished))
    client = cluster.up()
    client.finish(client.submit())
    assert cluster.key_file == wished
    assert cluster.end() == 0
    assert not wished.exists()

    wished.write_text("not a key file")
    failed = clusters.start(front_address="tcp://127.0.0.1:0", key_file=str(wished)).announced()
    assert isinstance(failed, ClusterFailed)
    assert f"{wished} is not a key file" in failed.message


@pytest.mark.slow
def test_a_plain_cluster_on_tcp_takes_everybody(clusters: Clusters) -> None:
    cluster = clusters.start(
        encrypt=False, front_address="tcp://127.0.0.1:0", back_address="tcp://127.0.0.1:0"
    )
    client = cluster.up()
    client.finish(handle := client.submit())
    assert client.tokens[handle] == tokens_after(4, 5)
    assert cluster.key_file is None
    assert cluster.end() == 0


def test_an_interrupt_at_any_moment_of_the_start_leaves_nothing(clusters: Clusters) -> None:
    slow = {"0": {"load_s": 600.0}}
    moments = ["worker_started", "group_started", "engine_listens", "loading"]
    starting = {moment: clusters.start(slow) for moment in moments}
    for moment, cluster in starting.items():
        cluster.wait_for(moment)
        cluster.process.send_signal(signal.SIGINT)
    for cluster in starting.values():
        failed = cluster.announced()
        assert isinstance(failed, ClusterFailed)
        assert "asked to stop before it was up: SIGINT" in failed.message
        assert cluster.wait() == 130
        cluster.check_nothing_is_left()


def test_a_start_that_fails_says_the_workers_own_words_and_leaves_nothing(
    clusters: Clusters,
) -> None:
    cluster = clusters.start(
        {"1": {"fail_at_load": "tensor x is 3 bytes short"}}, tensor_parallel_size=2
    )
    failed = cluster.announced()

    assert isinstance(failed, ClusterFailed)
    assert failed.message == "rank 1 of group 0 failed: ValueError: tensor x is 3 bytes short"
    assert cluster.wait() == 1
    cluster.check_nothing_is_left()


def test_a_worker_that_dies_before_it_can_speak_is_quoted(clusters: Clusters) -> None:
    folder = Path(tempfile.mkdtemp(prefix="stoker-test-"))
    (folder / "worker.py").write_text("raise SystemExit('libtorch.so is missing')")
    cluster = ClusterProcess(folder)
    clusters.all.append(cluster)
    failed = cluster.announced()

    assert isinstance(failed, ClusterFailed)
    assert "exited with code 1; it last wrote:\nlibtorch.so is missing" in failed.message
    assert cluster.wait() == 1
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_a_start_that_takes_too_long_ends_with_what_is_missing(clusters: Clusters) -> None:
    cluster = clusters.start({"0": {"load_s": 600.0}}, start_timeout_s=1.0)
    failed = cluster.announced()

    assert isinstance(failed, ClusterFailed)
    assert "not ready within start_timeout_s=1" in failed.message
    assert cluster.wait() == 1
    cluster.check_nothing_is_left()


def test_case_115_a_node_with_another_version_is_refused_by_name_before_weights_load(
    clusters: Clusters,
) -> None:
    script = {"facts": {"node": "n2", "torch": "1.0.0"}}
    cluster = clusters.start(script, tensor_parallel_size=2)
    failed = cluster.announced()

    assert isinstance(failed, ClusterFailed)
    wanted = version("torch")
    assert f"node n2 has torch 1.0.0, but {socket.gethostname()} has {wanted}" in failed.message
    assert cluster.wait() == 1
    assert "loading" not in cluster.text
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_a_start_that_waits_says_for_which_rank_and_what_it_does(clusters: Clusters) -> None:
    cluster = clusters.start({"1": {"load_s": 600.0}}, tensor_parallel_size=2, start_timeout_s=12)
    line = cluster.wait_for('doing="loads weights')
    failed = cluster.announced()

    host = socket.gethostname()
    assert f'who="rank 0.1" node={host} doing="loads weights" seconds=' in line
    assert isinstance(failed, ClusterFailed)
    assert f"rank 0.1 on {host} loads weights (for " in failed.message
    assert cluster.wait() == 1
    cluster.check_nothing_is_left()


def test_a_port_in_use_is_said_and_nothing_is_left(clusters: Clusters) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        cluster = clusters.start(front_address=address)
        failed = cluster.announced()

    assert isinstance(failed, ClusterFailed)
    assert f"{address} is in use by another process" in failed.message
    assert cluster.wait() == 1
    cluster.check_nothing_is_left()


def test_settings_that_do_not_fit_are_refused_before_anything_starts(clusters: Clusters) -> None:
    cluster = clusters.start(max_num_seqs=64, max_num_batched_tokens=16)
    failed = cluster.announced()
    assert isinstance(failed, ClusterFailed)
    assert "max_num_batched_tokens=16 is below max_num_seqs=64" in failed.message
    assert cluster.wait() == 1


def test_a_rank_that_is_killed_ends_its_requests_and_the_cluster_if_nothing_restarts(
    clusters: Clusters,
) -> None:
    cluster = clusters.start({"0": {"step_s": 0.01}}, max_restarts=0, tensor_parallel_size=2)
    client = cluster.up()
    victim = cluster.pids(client.status())[1]
    handle = client.submit(max_tokens=200)
    client.read_until(lambda: handle in client.tokens)
    os.kill(victim, signal.SIGKILL)
    client.finish(handle)

    assert client.ends[handle] is Finish.ERROR
    assert re.search(
        r"rank 1 of group 0 failed at step \d+: .* was ended by SIGKILL", client.messages[handle]
    )
    assert cluster.wait() == 1
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_a_rank_that_is_frozen_ends_its_requests_in_time(clusters: Clusters) -> None:
    cluster = clusters.start(
        {"0": {"step_s": 0.01}},
        step_timeout_s=0.5,
        stop_timeout_s=0.5,
        max_restarts=0,
        tensor_parallel_size=2,
    )
    client = cluster.up()
    victim = cluster.pids(client.status())[0]
    handle = client.submit(max_tokens=200)
    client.read_until(lambda: handle in client.tokens)
    os.kill(victim, signal.SIGSTOP)
    client.finish(handle)

    assert client.ends[handle] is Finish.ERROR
    assert "was not answered within step_timeout_s=0.5" in client.messages[handle]
    assert cluster.wait() == 1
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_no_token_is_lost(clusters: Clusters) -> None:
    cluster = clusters.start({"0": {"step_s": 0.01}}, tensor_parallel_size=2)
    client = cluster.up()
    handle = client.submit(max_tokens=60)
    client.read_until(lambda: handle in client.tokens)
    os.kill(cluster.pids(client.status())[1], signal.SIGKILL)
    client.finish(handle)

    assert client.tokens[handle] == tokens_after(4, 60)
    assert client.status().groups[0].epoch == 2
    assert cluster.end() == 0
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_the_cluster_ends_when_its_engine_is_killed_too_often(clusters: Clusters) -> None:
    cluster = clusters.start(max_engine_restarts=0)
    cluster.up()
    cluster.engine().kill()

    assert cluster.wait() == 1
    assert "the engine process ended: killed by signal 9; max_engine_restarts=0" in cluster.text
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_all_processes_end_with_a_supervisor_that_is_killed(clusters: Clusters) -> None:
    cluster = clusters.start(tensor_parallel_size=2)
    cluster.up()
    cluster.process.kill()
    cluster.wait()

    deadline = time.monotonic() + WAIT_S
    assert len(cluster._family) == 3
    assert all(is_over(child, deadline) for child in cluster._family.values())

    swept = ClusterProcess(cluster.folder)  # the next one clears the sockets' folder away
    clusters.all.append(swept)
    swept.up()
    assert len(list(cluster.folder.glob("stoker-*"))) == 1
    assert swept.end() == 0
    assert list(cluster.folder.glob("stoker-*")) == []


def test_a_term_signal_lets_streams_finish_within_the_drain(clusters: Clusters) -> None:
    cluster = clusters.start({"0": {"step_s": 0.01}}, drain_s=60.0)
    client = cluster.up()
    handles = [client.submit(max_tokens=50) for _ in range(4)]
    client.read_until(lambda: handles[0] in client.tokens)
    cluster.process.send_signal(signal.SIGTERM)
    cluster.wait_for("engine_stopping")
    late = client.submit()
    client.finish(*handles, late)

    assert [client.tokens[handle] for handle in handles] == [tokens_after(4, 50)] * 4
    assert client.rejections[late].reason == "shutting_down"
    assert cluster.wait() == 0
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_an_engine_that_was_stopped_for_a_while_goes_on_where_it_was(clusters: Clusters) -> None:
    """Longer than any limit in time: on one host only the end of a process is an end."""
    limits = {"peer_timeout_s": 0.5, "step_timeout_s": 1.0}
    cluster = clusters.start({"0": {"step_s": 0.05}}, **limits)
    client = cluster.up()
    handle = client.submit(num_prompt=4, max_tokens=50)
    client.read_until(lambda: handle in client.tokens)
    cluster.engine().suspend()
    while client.link.receive(timeout_s=3.0) is not None:
        pass
    cluster.engine().resume()
    client.finish(handle, again := client.submit(num_prompt=4, max_tokens=5))

    assert client.tokens[handle][-1] == tokens_after(4, 50)[-1]
    assert client.tokens[again] == tokens_after(4, 5)
    assert cluster.end() == 0
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_a_second_signal_shortens_the_drain(clusters: Clusters) -> None:
    cluster = clusters.start({"0": {"step_s": 0.1}}, drain_s=600.0)
    client = cluster.up()
    handle = client.submit(max_tokens=200)
    client.read_until(lambda: handle in client.tokens)
    cluster.process.send_signal(signal.SIGTERM)
    cluster.wait_for("engine_stopping")
    cluster.process.send_signal(signal.SIGTERM)
    client.finish(handle)

    assert client.ends[handle] is Finish.ABORT
    assert cluster.wait() == 0
    cluster.check_nothing_is_left()


@pytest.mark.slow
def test_an_idle_cluster_uses_next_to_no_cpu(clusters: Clusters) -> None:
    cluster = clusters.start(tensor_parallel_size=2)
    client = cluster.up()
    wait_for_status(client, lambda status: status.state == "serving")
    family = [psutil.Process(cluster.process.pid), *cluster._family.values()]

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in family)

    began, before = time.monotonic(), cpu_s()
    assert client.link.receive(timeout_s=10.0) is None
    share = (cpu_s() - before) / (time.monotonic() - began)

    assert len(family) == 4
    assert share < 0.02
