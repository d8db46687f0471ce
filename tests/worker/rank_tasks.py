"""What `RankProcesses` run in tests of the collectives: one rank's part, with its own checks."""

import math
import os
import random
import resource
import socket
import time
from contextlib import closing
from functools import cache
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
from torch import Tensor

from worker.gloo import GlooCommunicator
from worker.meeting_store import address_towards, listen, open_store
from worker.nccl import NcclCommunicator
from worker.parallel import Communicator, MeetingPoint, join
from worker.parallel_errors import CollectiveFailed, ColumnsMismatch
from worker.shared_memory import SharedMemoryCommunicator

START_TIMEOUT_S = 30.0
TIMEOUT_S = 30.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 2, 7, 576, 8 * 576, 12_289, 40_000, 131_073, 700_001)

_parent: list[Connection] = []
_listeners: dict[int, socket.socket] = {}


def set_up(link: Connection) -> None:
    torch.set_num_threads(1)
    _parent.append(link)


def say(message: object) -> None:
    _parent[0].send(message)


def hear() -> object:
    return _parent[0].recv()


def listen_here(rank: int) -> int:
    """Listen on a free port of the loopback interface, and keep at it until `connect`."""
    listener = listen("127.0.0.1")
    port = int(listener.getsockname()[1])
    _listeners[port] = listener
    return port


def connect(
    kind: str, rank: int, size: int, meeting: MeetingPoint, timeout_s: float = TIMEOUT_S
) -> Communicator:
    """One of the communicators; "torch" is NCCL's class on torch's gloo backend, on the CPU."""
    if kind == "shared":
        return SharedMemoryCommunicator(
            meeting.name,
            rank=rank,
            size=size,
            start_timeout_s=START_TIMEOUT_S,
            timeout_s=timeout_s,
            piece_bytes=64 * 1024,
        )
    store = open_store(
        meeting.host,
        meeting.port,
        rank=rank,
        size=size,
        timeout_s=START_TIMEOUT_S,
        listener=_listeners.pop(meeting.port, None),
    )
    if kind == "gloo":
        return GlooCommunicator(
            store,
            rank=rank,
            size=size,
            own_address=address_towards(meeting.host, meeting.port),
            start_timeout_s=START_TIMEOUT_S,
            timeout_s=timeout_s,
        )
    return NcclCommunicator(
        store,
        rank=rank,
        size=size,
        device=torch.device("cuda", rank) if kind == "nccl" else torch.device("cpu"),
        start_timeout_s=START_TIMEOUT_S,
        timeout_s=timeout_s,
        backend="nccl" if kind == "nccl" else "gloo",
    )


def part_of(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What `rank` brings: any rank can make any other's, to know what must come out."""
    numbers, count = _numbers(rank), math.prod(shape)
    start = seed * 7919 % (len(numbers) - count)
    return numbers[start : start + count].view(shape).to(dtype, copy=True)


@cache
def _numbers(rank: int) -> Tensor:
    """Of such different sizes that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(rank)
    scales = 10.0 ** torch.randint(-2, 3, (1_000_000,), generator=generator)
    return torch.randn(1_000_000, generator=generator) * scales


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    differ = actual.contiguous().view(raw) != expected.contiguous().view(raw)
    assert not differ.any(), f"{what}: {int(differ.sum())} of {differ.numel()} elements differ"


def check_sums(rank: int, size: int, kind: str, meeting: MeetingPoint) -> None:
    with closing(connect(kind, rank, size, meeting)) as communicator:
        for seed, (dtype, count) in enumerate((d, c) for d in DTYPES for c in SIZES):
            parts = [part_of(r, seed, (count,), dtype) for r in range(size)]
            given = parts[rank].clone()
            summed = communicator.all_reduce(given)
            assert_same_bits(summed, sum_in_order(parts), f"{count} x {dtype}")
            assert summed.data_ptr() == given.data_ptr(), "not in place"


def check_strided_sum(rank: int, size: int, kind: str, meeting: MeetingPoint) -> None:
    with closing(connect(kind, rank, size, meeting)) as communicator:
        parts = [part_of(r, 1, (40, 24), torch.float32) for r in range(size)]
        summed = communicator.all_reduce(parts[rank].t())
        assert_same_bits(summed, sum_in_order(parts).t(), "transposed")


def check_gathers(
    rank: int, size: int, kind: str, meeting: MeetingPoint, widths: tuple[int, ...]
) -> None:
    with closing(connect(kind, rank, size, meeting)) as communicator:
        for rows in (1, 3, 33):
            for dtype in DTYPES:
                parts = [part_of(r, rows, (rows, widths[r]), dtype) for r in range(size)]
                whole = communicator.gather_columns(parts[rank], widths)
                if rank != 0:
                    assert whole is None
                    continue
                assert whole is not None
                assert_same_bits(whole, torch.cat(parts, dim=1), f"{rows} x {widths} x {dtype}")


def check_wrong_width(rank: int, size: int, kind: str, meeting: MeetingPoint) -> None:
    with closing(connect(kind, rank, size, meeting)) as communicator:
        for widths in ([5, 6], [5], [5, 5, 5]):
            with pytest.raises(ColumnsMismatch, match=f"rank {rank} of {size} gathers"):
                communicator.gather_columns(torch.ones(2, 4), widths)
        assert communicator.all_reduce(torch.ones(1)).tolist() == [size]


def check_broadcasts(rank: int, size: int, kind: str, meeting: MeetingPoint) -> None:
    with closing(connect(kind, rank, size, meeting)) as communicator:
        for source in range(size):
            for count in (1, 32, 50_000):
                told = torch.arange(count) * 7 + source
                mine = told.clone() if rank == source else torch.zeros_like(told)
                assert_same_bits(
                    communicator.broadcast(mine, source), told, f"{count} from {source}"
                )


def check_mixture(rank: int, size: int, kind: str, meeting: MeetingPoint, count: int) -> None:
    """Many collectives of all sorts and sizes, in the same order on every rank."""
    dice = random.Random(5)
    with closing(connect(kind, rank, size, meeting)) as communicator:
        for number in range(count):
            communicator.start_step(number)
            choice, source = dice.choice(("sum", "sum", "gather", "tell")), dice.randrange(size)
            length = dice.choice((1, 3, 100, 1_000, dice.randrange(1, 20_000)))
            dtype, widths = dice.choice(DTYPES), [dice.randrange(1, 200) for _ in range(size)]
            what = f"{number}: {choice} of {length} x {dtype}"
            if choice == "sum":
                parts = [part_of(r, number, (length,), dtype) for r in range(size)]
                summed = communicator.all_reduce(parts[rank].clone())
                assert_same_bits(summed, sum_in_order(parts), what)
            elif choice == "gather":
                rows = 1 + length % 40
                parts = [part_of(r, number, (rows, widths[r]), dtype) for r in range(size)]
                whole = communicator.gather_columns(parts[rank], widths)
                if whole is not None:
                    assert_same_bits(whole, torch.cat(parts, dim=1), what)
            else:
                told = part_of(source, number, (length,), dtype)
                mine = told.clone() if rank == source else torch.zeros_like(told)
                assert_same_bits(communicator.broadcast(mine, source), told, what)


def check_every_half(rank: int, size: int, kind: str, meeting: MeetingPoint) -> None:
    """All 16-bit patterns survive being widened and rounded, and sums round as torch's do."""
    with closing(connect(kind, rank, size, meeting)) as communicator:
        patterns = torch.arange(65_536).to(torch.uint16).view(torch.int16)
        for dtype in (torch.bfloat16, torch.float16):
            every = patterns.view(dtype)
            mine = every.clone() if rank == 0 else torch.zeros_like(every)
            kept = communicator.all_reduce(mine)
            numbers = ~every.isnan()
            expected = every + torch.zeros_like(every)  # -0 + 0 is 0
            assert_same_bits(kept[numbers], expected[numbers], f"every {dtype}")
            assert kept[~numbers].isnan().all()
            order = torch.randperm(65_536, generator=torch.Generator().manual_seed(1))
            parts = [every, every[order]]
            summed = communicator.all_reduce(parts[rank].clone())
            expected = sum_in_order(parts)
            numbers = ~expected.isnan()
            assert_same_bits(summed[numbers], expected[numbers], f"pairs of {dtype}")
            assert summed[~numbers].isnan().all()


def check_gpu_collectives(rank: int, size: int, meeting: MeetingPoint) -> None:
    """Sums, gathers and broadcasts on GPUs, at once and in replays of a captured graph."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    widths = [100 + r for r in range(size)]
    with closing(connect("nccl", rank, size, meeting)) as communicator:
        for dtype in DTYPES:
            for count in (576, 300_000):
                given = part_of(rank, 0, (count,), dtype).to(device)
                communicator.all_reduce(given.clone())
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = communicator.all_reduce(given.clone())
                for seed in range(3):
                    parts = [part_of(r, seed, (count,), dtype) for r in range(size)]
                    given.copy_(parts[rank])
                    at_once = communicator.all_reduce(given.clone())
                    graph.replay()
                    for summed in (at_once, captured):
                        assert_same_bits(summed.cpu(), sum_in_order(parts), f"{count} x {dtype}")
            parts = [part_of(r, 1, (5, widths[r]), dtype) for r in range(size)]
            whole = communicator.gather_columns(parts[rank].to(device), widths)
            if whole is not None:
                assert_same_bits(whole.cpu(), torch.cat(parts, dim=1), f"gather of {dtype}")
        told = torch.arange(32, device=device)
        heard = communicator.broadcast(told.clone() if rank == 0 else torch.zeros_like(told))
        assert_same_bits(heard.cpu(), told.cpu(), "broadcast")


def sum_in_any_order(rank: int, size: int, meeting: MeetingPoint) -> list[float]:
    """What ranks 1, 2, ... sum to, by the class for GPUs with sums left to the backend."""
    store = open_store(
        meeting.host,
        meeting.port,
        rank=rank,
        size=size,
        timeout_s=START_TIMEOUT_S,
        listener=_listeners.pop(meeting.port, None),
    )
    communicator = NcclCommunicator(
        store,
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        start_timeout_s=START_TIMEOUT_S,
        timeout_s=TIMEOUT_S,
        sums_in_rank_order=False,
        backend="gloo",
    )
    with closing(communicator):
        numbers: list[float] = communicator.all_reduce(
            torch.tensor([1.0, 2.0]) * (rank + 1)
        ).tolist()
        return numbers


def check_agreement(rank: int, size: int, first: MeetingPoint, second: MeetingPoint) -> None:
    """Gloo and shared memory give the same bits."""
    with (
        closing(connect("shared", rank, size, first)) as shared,
        closing(connect("gloo", rank, size, second)) as gloo,
    ):
        for seed, dtype in enumerate(DTYPES):
            for count in (576, 100_000):
                part = part_of(rank, seed, (count,), dtype)
                assert_same_bits(
                    shared.all_reduce(part.clone()), gloo.all_reduce(part.clone()), str(dtype)
                )


def check_join(rank: int, size: int, meeting: MeetingPoint, is_one_host: bool) -> str:
    communicator = join(
        meeting,
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        is_one_host=is_one_host,
        start_timeout_s=START_TIMEOUT_S,
        timeout_s=TIMEOUT_S,
        listener=_listeners.pop(meeting.port, None),
    )
    with closing(communicator):
        assert communicator.all_reduce(torch.ones(3)).tolist() == [size] * 3
        return type(communicator).__name__


def sum_once(
    rank: int, size: int, kind: str, meeting: MeetingPoint, timeout_s: float, steps: int
) -> None:
    """Sum in step after step, and say so before each."""
    with closing(connect(kind, rank, size, meeting, timeout_s)) as communicator:
        for step in range(1, steps + 1):
            communicator.start_step(step)
            say(step)
            communicator.all_reduce(torch.ones(8))


def sum_when_told(rank: int, size: int, kind: str, meeting: MeetingPoint, timeout_s: float) -> None:
    """Meet the others, then sum as often as the parent says, and say so after each."""
    with closing(connect(kind, rank, size, meeting, timeout_s)) as communicator:
        while hear() == "sum":
            communicator.all_reduce(torch.ones(8))
            say("summed")


def fail_twice(rank: int, size: int, kind: str, meeting: MeetingPoint) -> tuple[str, str]:
    """What two collectives in turn raise while another rank stays away."""
    said = []
    with closing(connect(kind, rank, size, meeting, timeout_s=0.3)) as communicator:
        communicator.start_step(41)
        for _ in range(2):
            try:
                communicator.all_reduce(torch.ones(8))
            except CollectiveFailed as error:
                said.append(f"{type(error).__name__}: {error}")
    return said[0], said[1]


def sum_or_broadcast(
    rank: int, size: int, kind: str, meeting: MeetingPoint, timeout_s: float
) -> str:
    """Rank 0 sums while the others broadcast: out of step. What comes of it."""
    with closing(connect(kind, rank, size, meeting, timeout_s)) as communicator:
        communicator.start_step(rank + 7)
        try:
            if rank == 0:
                communicator.all_reduce(torch.ones(8))
            else:
                communicator.broadcast(torch.ones(8), source=1)
                communicator.broadcast(torch.ones(8), source=0)
        except CollectiveFailed as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def wait_long(rank: int, size: int, meeting: MeetingPoint) -> tuple[float, float]:
    """Rank 0 says when it has slept for a while; the others come only then."""
    with closing(connect("shared", rank, size, meeting)) as communicator:
        if rank == 0:
            assert isinstance(communicator, SharedMemoryCommunicator)
            segment = communicator._segment
            look, looks = segment.gone, iter(range(1000))

            def look_and_say() -> tuple[int, ...]:
                if next(looks) == 3:
                    say("asleep")
                return look()

            segment.gone = look_and_say  # type: ignore[method-assign]
        else:
            hear()
        cpu, wall = time.process_time(), time.monotonic()
        assert communicator.all_reduce(torch.ones(4)).tolist() == [size] * 4
        return time.process_time() - cpu, time.monotonic() - wall


def meet_alone(rank: int, size: int, meeting: MeetingPoint) -> str:
    """Come to a meeting of gloo ranks where nobody else comes; what is said."""
    store = open_store(
        meeting.host,
        meeting.port,
        rank=rank,
        size=size,
        timeout_s=0.3,
        listener=_listeners.pop(meeting.port),
    )
    try:
        GlooCommunicator(
            store, rank=rank, size=size, own_address="127.0.0.1", start_timeout_s=0.3, timeout_s=1.0
        )
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def addresses_in_use(rank: int, size: int, meeting: MeetingPoint, own: str) -> set[str]:
    """Where a gloo rank listens that was told to use the address `own`."""
    store = open_store(
        meeting.host,
        meeting.port,
        rank=rank,
        size=size,
        timeout_s=START_TIMEOUT_S,
        listener=_listeners.pop(meeting.port, None),
    )
    communicator = GlooCommunicator(
        store,
        rank=rank,
        size=size,
        own_address=own,
        start_timeout_s=START_TIMEOUT_S,
        timeout_s=TIMEOUT_S,
    )
    with closing(communicator):
        communicator.all_reduce(torch.ones(8))
        sockets = psutil.Process().net_connections("tcp")
        return {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}


def meet_without_memory(rank: int, size: int, meeting: MeetingPoint) -> str:
    """Try to share memory where the system grants next to none; what is said."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        connect("shared", rank, size, meeting).close()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "no error"


def open_files(rank: int, size: int) -> int:
    return len(os.listdir("/proc/self/fd"))
