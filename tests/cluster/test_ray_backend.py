"""Ray actors as workers: placed, watched, killed, and nothing left on the host."""

import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.backend import RankExit
from cluster.errors import BackendError
from cluster.logs import EventLog
from cluster.ray_backend import RayBackend
from tests.cluster.launches import make_launch

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def exits() -> "queue.Queue[RankExit]":
    return queue.Queue()


@pytest.fixture(scope="module")
def backend(exits: "queue.Queue[RankExit]") -> Iterator[RayBackend]:
    backend = RayBackend(exits.put, num_ranks=2, cores=(0, 1), log=EventLog("test"))
    backend.open(timeout_s=60)
    yield backend
    backend.close(timeout_s=10)
    assert not backend._ray.folder


def ray_processes() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "ray" in " ".join(child.cmdline()).lower()
    ]


def test_every_socket_of_our_own_ray_is_on_loopback(backend: RayBackend) -> None:
    addresses = {
        connection.laddr.ip
        for process in ray_processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }

    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_the_token_and_files_of_our_own_ray_are_for_their_owner_alone(backend: RayBackend) -> None:
    assert backend._ray.folder is not None

    for path in (backend._ray.folder, backend._ray.folder / "token"):
        assert path.stat().st_mode & 0o077 == 0


def test_two_ranks_get_a_core_each_and_a_dead_one_is_reported(
    backend: RayBackend, exits: "queue.Queue[RankExit]", tmp_path: Path
) -> None:
    places = backend.place(0, 1, 1, 2, timeout_s=30)
    assert [place.cores for place in places] == [(0,), (1,)]
    assert len({place.node for place in places}) == 1
    launches = [
        make_launch(rank=rank, num_ranks=2, address=f"ipc://{tmp_path}/none") for rank in (0, 1)
    ]
    backend.start(launches, timeout_s=10)

    gone = exits.get(timeout=60)

    assert (gone.group, gone.epoch, gone.was_asked) == (0, 1, False)
    assert "exited with code" in gone.message
    backend.stop(0, 1, timeout_s=5)


def test_stopping_a_group_gives_its_room_back(
    backend: RayBackend, exits: "queue.Queue[RankExit]"
) -> None:
    for epoch in (2, 3):
        assert len(backend.place(0, epoch, 1, 2, timeout_s=30)) == 2
        backend.stop(0, epoch, timeout_s=5)


def test_case_105_more_ranks_than_there_is_room_for_are_refused_with_asked_and_free(
    backend: RayBackend,
) -> None:
    with pytest.raises(BackendError) as caught:
        backend.place(0, 9, 1, 3, timeout_s=20)

    message = str(caught.value)
    assert "asked for 3 CPU (3 ranks), there are 2 of 2 CPU free" in message
    assert "127.0.0.1" in message
    assert "Lower tensor_parallel_size" in message
    assert len(backend.place(0, 10, 1, 2, timeout_s=30)) == 2, "nothing was taken"
    backend.stop(0, 10, timeout_s=5)


def test_an_address_where_no_ray_answers_is_an_error_in_time() -> None:
    program = (
        "from cluster.ray_backend import RayBackend\n"
        "from cluster.logs import EventLog\n"
        "from cluster.errors import BackendError\n"
        "b = RayBackend(print, num_ranks=1, cores=(0,), log=EventLog('t'), "
        "address='127.0.0.1:1')\n"
        "try:\n    b.open(30)\nexcept BackendError as error:\n    print('said:', error)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )

    assert "no Ray cluster answers at 127.0.0.1:1" in done.stdout
