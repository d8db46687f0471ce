"""How `stoker status` finds the clusters of one user."""

import os
from pathlib import Path

import msgspec

from stoker.running import RunningCluster, announced, running_clusters


def test_a_cluster_is_found_as_long_as_it_runs(tmp_path: Path) -> None:
    folder = tmp_path / "running"

    with announced("ipc://one", "tiny", folder), announced("ipc://two", "tiny", folder):
        found = running_clusters(folder)

    assert {cluster.address for cluster in found} == {"ipc://one", "ipc://two"}
    assert {cluster.pid for cluster in found} == {os.getpid()}
    assert running_clusters(folder) == []
    assert not folder.exists()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    left = tmp_path / "cluster-x.json"
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    left.write_bytes(msgspec.json.encode(RunningCluster(address="ipc://gone", model="m", pid=gone)))

    assert running_clusters(tmp_path) == []
    assert not left.exists()


def test_damaged_files_are_passed_over(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "cluster-x.json").write_text("{half")

    assert running_clusters(tmp_path) == []


def test_a_folder_that_others_may_write_to_is_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "running"
    with announced("ipc://one", "tiny", folder):
        folder.chmod(0o777)
        assert running_clusters(folder) == []
        with announced("ipc://two", "tiny", folder):
            assert len(list(folder.iterdir())) == 1


def test_where_nothing_ever_ran_nothing_is_found(tmp_path: Path) -> None:
    assert running_clusters(tmp_path / "never") == []
