"""Memory for weights: filled by one, sealed, and read by many."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from worker.errors import UnfitWeights
from worker.kept_weights import is_sealed
from worker.weight_memory import SharedArena, map_sealed

MIB = 1 << 20


def kept(*tensors: torch.Tensor, form: bytes = b"form") -> tuple[list[torch.Tensor], int]:
    arena = SharedArena(64 * MIB)
    placed = [arena.keep(tensor) for tensor in tensors]
    return placed, arena.seal(form)


def test_what_was_filled_is_read_elsewhere_bit_by_bit_with_its_form() -> None:
    numbers = torch.randn(1000, 33)

    _, fd = kept(torch.arange(5), numbers, form=b"where what lies")
    memory, form = map_sealed(fd)
    os.close(fd)

    assert form == b"where what lies"
    start = 128  # after the five, at the next border of two cache lines
    assert torch.equal(
        memory[start : start + numbers.nbytes].view(torch.float32).view(1000, 33), numbers
    )


def test_tensors_stay_where_they_are_when_their_memory_is_sealed() -> None:
    numbers = torch.randn(3 * mmap.PAGESIZE)
    arena = SharedArena(64 * MIB)
    placed = arena.keep(numbers)
    at = placed.data_ptr()

    os.close(arena.seal(b""))

    assert placed.data_ptr() == at
    assert torch.equal(placed, numbers)


def test_nobody_can_change_what_is_sealed() -> None:
    _, fd = kept(torch.ones(100))

    assert is_sealed(fd)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_WRITE)
    os.close(fd)


def test_a_tensor_in_sealed_memory_can_only_be_read() -> None:
    (placed,), fd = kept(torch.ones(100))
    os.close(fd)

    assert access_of(placed) == "r--p"


def access_of(tensor: torch.Tensor) -> str:
    """That this process has to a tensor's memory (proc_pid_maps(5))."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_ = line.split()
        start, stop = (int(end, 16) for end in span.split("-"))
        if start <= tensor.data_ptr() < stop:
            return access
    raise AssertionError("not mapped")


def test_memory_that_is_not_sealed_or_not_ours_is_refused(tmp_path: Path) -> None:
    open_fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(open_fd, 4096)
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    with file.open("rb") as opened:
        for fd in (open_fd, opened.fileno()):
            with pytest.raises(UnfitWeights, match="not sealed"):
                map_sealed(fd)
    os.close(open_fd)


def test_only_what_is_handed_out_takes_memory() -> None:
    arena = SharedArena(1 << 40)

    arena.keep(torch.ones(MIB // 4))

    size = os.fstat(fd := arena.seal(b"")).st_size
    os.close(fd)
    assert size <= MIB + 4096


def test_more_than_was_expected_is_an_error_and_no_overrun() -> None:
    arena = SharedArena(2 * MIB)
    with pytest.raises(ValueError, match="at most"):
        arena.keep(torch.zeros(3 * MIB, dtype=torch.uint8))
    arena.close()
