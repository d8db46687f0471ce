"""Run the native kernels under sanitizers: `make sanitize`.

Builds them with AddressSanitizer and UndefinedBehaviorSanitizer into build/sanitize and runs
their tests over that build, on every level of this machine: torch's and numpy's memory then comes
from AddressSanitizer too, so a read or write past a tensor ends the run. ThreadSanitizer cannot
live inside Python; it watches tests/worker/ops/native/team_race.cpp, a program over the threads
alone. The compiler must be GCC, or Clang with its libraries where -print-file-name finds them.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from worker.ops.native.team import levels

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "worker/ops/native/kernels"
BUILD = ROOT / "build/sanitize"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ("-std=c++17", "-g", "-fno-omit-frame-pointer", "-Wno-psabi", "-pthread", "-fPIC")
SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-DSTOKER_INLINE=static inline",  # all in line, the checks take minutes to compile
)
TESTS = ("tests/worker/ops/native",)
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:verify_asan_link_order=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def main() -> int:
    BUILD.mkdir(parents=True, exist_ok=True)
    build()
    for command, environment in (
        ([str(BUILD / "team_race")], {}),
        (
            [sys.executable, "-m", "scripts.sanitize", "inside"],
            {"LD_PRELOAD": " ".join(runtimes())},
        ),
    ):
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **OPTIONS, **environment})
        if done.returncode:
            return done.returncode
    return 0


def build() -> None:
    """Each source on its own, then the library and the program."""
    sources = sorted(KERNELS.glob("*.cpp"))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compiled, sources))
    run(COMPILER, "-shared", "-pthread", *SANITIZE, *objects, "-o", BUILD / "kernels.so")
    race = ROOT / "tests/worker/ops/native/team_race.cpp"
    team = KERNELS / "team.cpp"
    flags = (*FLAGS, "-O1", "-fsanitize=thread", "-I", KERNELS)
    run(COMPILER, *flags, race, team, "-o", BUILD / "team_race")


def compiled(source: Path) -> Path:
    """A level that this machine cannot run is not watched: nothing would see it."""
    to = BUILD / f"{source.stem}.o"
    level = source.stem.removeprefix("level_")
    is_run = level == source.stem or level in levels()
    run(COMPILER, *FLAGS, "-O1", *(SANITIZE if is_run else ()), "-c", source, "-o", to)
    return to


def runtimes() -> list[str]:
    """What must be loaded before Python's own libraries."""
    return [
        subprocess.run(
            [COMPILER, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


def test_inside() -> int:
    """The tests, over the library in BUILD, in a process with the sanitizers' runtimes."""
    import pytest

    from worker.ops.native import library

    os.environ.pop("LD_PRELOAD")  # processes of tests are not watched
    library._FOLDER = BUILD
    about_other_builds = f"--ignore={ROOT / 'tests/worker/ops/native/test_library.py'}"
    tests = (str(ROOT / test) for test in TESTS)
    return pytest.main(["-q", "-p", "no:cacheprovider", about_other_builds, *tests])


if __name__ == "__main__":
    sys.exit(test_inside() if sys.argv[1:] == ["inside"] else main())
