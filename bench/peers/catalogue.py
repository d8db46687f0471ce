"""How each side named in `bars` is started."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.peers import environments, weights
from bench.peers.side import Side

LARGE = ".large"
STOKER = {
    "stoker.fp32": ("dtype=float32", "enable_prefix_caching=false"),
    "stoker.bf16": ("dtype=bfloat16", "enable_prefix_caching=false"),
    "stoker.int8": ("quantization=int8", "dtype=bfloat16", "enable_prefix_caching=false"),
    "stoker.tp2": ("dtype=float32", "enable_prefix_caching=false", "tensor_parallel_size=2"),
    "stoker.http": ("dtype=float32", "enable_prefix_caching=false"),
    "stoker.cached": ("dtype=float32",),
    "stoker.ray": ("dtype=float32", "backend=ray"),
}
"""Settings beside those of `stoker_driver.SETTINGS`; `--backend local` unless another is named."""
VLLM = {"vllm.fp32": "float32", "vllm.bf16": "bfloat16"}
PEERS = ("vllm", "llama", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Starts sides on this machine."""

    folder: Path
    """Environments, weights and logs."""
    threads: int
    eager: bool = False
    """vLLM without compiling: starts in a quarter of the time, and is slower."""

    def start(self, name: str) -> Side:
        """Launch a side, making first what it needs.

        Raises:
            PeerMissing: a peer cannot be installed here.
        """
        is_large, plain = name.endswith(LARGE), name.removesuffix(LARGE)
        model = weights.large_model(self._weights) if is_large else weights.small_model()
        kind, _, form = plain.partition(".")
        if kind == "vllm":
            program = environments.vllm(self.folder, self.threads)
            words = [str(program.path), "-m", "bench.peers.vllm_driver", str(model), VLLM[plain]]
            if self.eager:
                words.append("--eager")
            return self._launch(name, words, program.environment, can_be_stopped=True)
        if kind == "llama":
            program = environments.llama_server(self.folder)
            file = weights.gguf_file(model, form, self._weights)
            return self._python(
                name, "llama_driver", str(program.path), str(file), "--about", program.about,
                "--threads", str(self.threads), can_be_stopped=True,
            )  # fmt: skip
        if kind == "transformers":
            return self._python(
                name, "transformers_driver", str(model), "--threads", str(self.threads),
                can_be_stopped=True,
            )  # fmt: skip
        settings = STOKER[plain]
        ranks = 2 if "tensor_parallel_size=2" in settings else 1
        driver = "stoker_http_driver" if plain == "stoker.http" else "stoker_driver"
        return self._python(
            name, driver, str(model), "backend=local", f"num_threads={self.threads // ranks}",
            *settings, can_be_stopped=False,
        )  # fmt: skip

    @property
    def _weights(self) -> Path:
        return self.folder / "weights"

    def _python(self, name: str, driver: str, *words: str, can_be_stopped: bool) -> Side:
        """A driver in our own environment."""
        command = [sys.executable, "-m", f"bench.peers.{driver}", *words]
        return self._launch(name, command, {}, can_be_stopped=can_be_stopped)

    def _launch(
        self, name: str, words: list[str], environment: Mapping[str, str], *, can_be_stopped: bool
    ) -> Side:
        log = self.folder / "logs" / f"{name}.log"
        return Side(words, environment, log, can_be_stopped=can_be_stopped)
