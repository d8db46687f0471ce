"""The memory of this process and its host, as the kernel tells it. Needs no torch."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def peak_growth(run: Callable[[], None], proc: Path = PROC) -> int:
    """Most bytes by which this process grew while `run` ran.

    Where the kernel does not let us reset the mark of the peak, it is that of the whole life
    of the process, so the answer is too large rather than too small.
    """
    with suppress(OSError):
        (proc / "self/clear_refs").write_text("5")
    before = _status_bytes(proc, "VmRSS")
    run()
    return max(0, _status_bytes(proc, "VmHWM") - before)


def trim_heap() -> None:
    """Give the system back what this process has freed, where the C library can (glibc)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def free_host_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that processes may still take without swapping: the machine's, or less if this
    process lives in a control group (a container) with a limit."""
    available = _kib_fields(proc / "meminfo")["MemAvailable"]
    return min([available, *_group_rooms(proc, cgroup)])


def _group_rooms(proc: Path, cgroup: Path) -> list[int]:
    """What each limited control group above this process still has room for."""
    rooms = []
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, cache = cgroup, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = cgroup / "memory", "memory.limit_in_bytes"
            used, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == root.parent:
                break
            room = _room_in(folder, limit, used, cache)
            if room is not None:
                rooms.append(room)
    return rooms


def _room_in(folder: Path, limit: str, used: str, cache: str) -> int | None:
    """Limit less use, of which cached files do not count; None where nothing is limited."""
    try:
        most = (folder / limit).read_text().strip()
        in_use = int((folder / used).read_text())
    except (OSError, ValueError):
        return None
    if most == "max":
        return None
    cached = 0
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cache:
                cached = int(value)
    return max(0, int(most) - in_use + cached)


def _status_bytes(proc: Path, name: str) -> int:
    return _kib_fields(proc / "self/status")[name]


def _kib_fields(file: Path) -> dict[str, int]:
    """The fields of a /proc file that are given in kB, in bytes."""
    fields = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB":
            fields[name] = int(number) * 1024
    return fields
