"""What keeps weights on a host, and ranks that come to it, over real sockets and no cluster."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from cluster.keeper_link import FILL, FILLED, Ask, KeeperLink, abstract, model_identity
from cluster.logs import EventLog
from cluster.weight_keeper import WeightKeeper
from tests.worker.tiny_models import save_model
from worker.weight_memory import SharedArena, map_sealed

KEY = "secret"
PART, FORM = "rank 0 of 1", "float32"


@pytest.fixture
def keeper() -> Iterator[WeightKeeper]:
    before = set(os.listdir("/proc/self/fd"))
    keeper = WeightKeeper(KEY, EventLog("test"))
    yield keeper
    keeper.close()
    keeper.close()
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("model"))[1]


def filled(number: float) -> int:
    arena = SharedArena(1 << 20)
    arena.keep(torch.full((1000,), number))
    return arena.seal(b"form")


def first_number(fd: int) -> float:
    memory, form = map_sealed(fd)
    os.close(fd)
    assert form == b"form"
    return float(memory[:4].view(torch.float32))


def lend(link: KeeperLink, number: float) -> bool:
    fd = filled(number)
    try:
        return link.lend(fd)
    finally:
        os.close(fd)


def test_a_rank_gets_what_one_before_it_has_filled_also_when_that_is_gone(
    keeper: WeightKeeper, folder: Path
) -> None:
    first, second = (KeeperLink(keeper.name, KEY, folder) for _ in range(2))
    assert first.borrow(PART, FORM) is None
    assert lend(first, 7.0)
    first.close()

    fd = second.borrow(PART, FORM)

    assert fd is not None
    assert first_number(fd) == 7.0
    second.close()


def test_ranks_that_come_while_one_reads_wait_for_it(keeper: WeightKeeper, folder: Path) -> None:
    links = [KeeperLink(keeper.name, KEY, folder) for _ in range(4)]
    assert links[0].borrow(PART, FORM) is None
    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(link.borrow, PART, FORM) for link in links[1:]]
        assert lend(links[0], 3.0)
        fds = [other.result(timeout=20) for other in others]

    assert [first_number(fd) for fd in fds if fd is not None] == [3.0] * 3
    for link in links:
        link.close()


def test_when_the_reading_rank_is_killed_the_next_one_reads_and_nothing_of_it_is_mapped(
    keeper: WeightKeeper, folder: Path
) -> None:
    program = (
        "import os, sys\nfrom pathlib import Path\nimport torch\n"
        "from cluster.keeper_link import KeeperLink\nfrom worker.weight_memory import SharedArena\n"
        f"link = KeeperLink({keeper.name!r}, {KEY!r}, Path({str(folder)!r}))\n"
        f"assert link.borrow({PART!r}, {FORM!r}) is None\n"
        "SharedArena(1 << 20).keep(torch.ones(1000))\n"
        "print('fills', flush=True)\nsys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"fills\n"
    link = KeeperLink(keeper.name, KEY, folder)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(link.borrow, PART, FORM)
        child.kill()
        assert waiting.result(timeout=20) is None
    child.wait()
    child.stdin.close()
    child.stdout.close()

    assert lend(link, 5.0)
    link.close()


def test_who_does_not_know_the_key_gets_nothing(keeper: WeightKeeper, folder: Path) -> None:
    owner = KeeperLink(keeper.name, KEY, folder)
    owner.borrow(PART, FORM)
    assert lend(owner, 1.0)

    stranger = KeeperLink(keeper.name, "guess", folder)

    assert stranger.borrow(PART, FORM) is None
    assert not lend(stranger, 2.0)
    owner.close()


def say(keeper: WeightKeeper, *messages: bytes, fds: tuple[int, ...] = ()) -> bytes:
    """What the keeper says last; nothing if it hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(20)
        link.connect(abstract(keeper.name))
        answer = b""
        for index, message in enumerate(messages):
            socket.send_fds(link, [message], fds if index == len(messages) - 1 else ())
            answer = link.recv(100)
        return answer


ASK = msgspec.json.encode(Ask(key=KEY, part=PART, version="x"))


@pytest.mark.parametrize(
    "messages",
    [(b"noise",), (b"\xff" * 4096,), (FILLED,), (ASK, ASK), (ASK, FILLED)],
    ids=["noise", "much noise", "unasked", "asks twice", "fills nothing"],
)
def test_who_says_anything_else_is_sent_away(
    keeper: WeightKeeper, messages: tuple[bytes, ...]
) -> None:
    assert say(keeper, *messages) == b""
    assert say(keeper, ASK) == FILL  # and the keeper goes on


def test_memory_that_is_not_sealed_is_not_kept(keeper: WeightKeeper) -> None:
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)

    assert say(keeper, ASK, FILLED, fds=(fd,)) == b""
    os.close(fd)
    assert say(keeper, ASK) == FILL


def test_a_keeper_that_is_gone_costs_nothing_but_reading(folder: Path) -> None:
    link = KeeperLink("stoker-weights-nobody", KEY, folder)

    assert link.borrow(PART, FORM) is None
    assert not lend(link, 1.0)


def test_a_waiting_rank_reads_for_itself_when_the_keeper_ends(folder: Path) -> None:
    keeper = WeightKeeper(KEY, EventLog("test"))
    first, second = (KeeperLink(keeper.name, KEY, folder) for _ in range(2))
    first.borrow(PART, FORM)
    came = threading.Event()

    def borrow() -> int | None:
        came.set()
        return second.borrow(PART, FORM)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(borrow)
        came.wait(20)
        keeper.close()
        assert waiting.result(timeout=20) is None
    assert not lend(first, 1.0)


def test_weights_of_a_model_that_has_changed_are_never_those_of_before(
    keeper: WeightKeeper, tmp_path: Path
) -> None:
    _, folder = save_model("llama", tmp_path)
    first = KeeperLink(keeper.name, KEY, folder)
    first.borrow(PART, FORM)
    assert lend(first, 1.0)
    first.close()
    before = model_identity(folder)
    change_one_byte(folder)

    second = KeeperLink(keeper.name, KEY, folder)

    assert model_identity(folder) != before
    assert second.borrow(PART, FORM) is None  # it is to read them
    second.close()


def test_weights_that_changed_while_they_were_read_are_not_kept(
    keeper: WeightKeeper, tmp_path: Path
) -> None:
    _, folder = save_model("llama", tmp_path)
    link = KeeperLink(keeper.name, KEY, folder)
    link.borrow(PART, FORM)
    change_one_byte(folder)

    assert not lend(link, 1.0)


def change_one_byte(folder: Path) -> None:
    """Of a weight, in the middle of the file."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
