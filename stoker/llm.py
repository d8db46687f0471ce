"""A model in a few lines: `LLM(...)` brings a cluster up, answers, and takes it down.

The calling process loads neither torch nor ray: the cluster is processes of its own, and this
is a client of it.
"""

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cluster.config import load_config_over
from cluster.engine_config import EngineConfig
from cluster.errors import ModelError, StartFailed
from cluster.frontend.draft import Prompt
from cluster.frontend.errors import ClientClosed, EngineLost
from cluster.frontend.tokenizer import Tokenizer
from scheduler.errors import ConfigError
from scheduler.sampling import SamplingParams
from stoker.client import Client
from stoker.cluster_process import ClusterProcess
from stoker.outputs import RequestOutput
from stoker.progress import answers_bar, starting_spinner
from stoker.prompts import Chat, listed_chats, listed_prompts

QUIET = {"log_level": "warning"}
"""Where answers are what a user wants to see: the cluster's life is shown to who asks for it."""

Setting = str | int | float | bool | os.PathLike[str] | None


class LLM:
    """A cluster of its own for one model, until closed.

    Everything ends with `close`, with the `with` block, with the interpreter, or with the
    process, however it ends. Several may live side by side.

    Args:
        model: a folder with a checkpoint, a GGUF file, "smollm2", or a Hugging Face name.
            None: SmolLM2-135M-Instruct, fetched on first use.
        seed: makes requests without a seed of their own draw theirs from it, so that a program
            that runs alone repeats its answers.
        settings: those of `cluster.config.EngineConfig`, such as `tensor_parallel_size`,
            `gpu_memory_utilization`, `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`,
            `block_size`, `enable_prefix_caching`, `num_kv_blocks`, `kv_cache_memory_bytes`,
            `dtype`, `quantization`, `backend`, `num_groups` (also `data_parallel_size`),
            `scheduling_policy`; `log_level="info"` shows the cluster's life (default: warnings).
    Raises:
        ConfigError: a setting that there is not, or with a value that cannot be.
        ModelError: there is no such model.
        StartFailed: the cluster did not come up; the message says why.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        seed: int | None = None,
        **settings: Setting,
    ) -> None:
        if "data_parallel_size" in settings:
            settings["num_groups"] = settings.pop("data_parallel_size")
        given = {"model": None if model is None else os.fspath(model), **settings}
        try:
            self._start(load_config_over(QUIET, None, None, **given), seed)
        except (ConfigError, ModelError, StartFailed) as error:
            # Its text says all; where in here it came from would only push it out of sight.
            raise error.with_traceback(None) from None

    @classmethod
    def of_config(cls, config: EngineConfig, *, seed: int | None = None) -> "LLM":
        """A cluster from settings that are checked already."""
        llm = cls.__new__(cls)
        llm._start(config, seed)
        return llm

    def _start(self, config: EngineConfig, seed: int | None) -> None:
        is_quiet = config.log_level in ("warning", "error")
        config = with_model_at_hand(config)
        cluster = ClusterProcess(config)
        with starting_spinner(config.model or "the default model", is_wanted=is_quiet):
            ready = cluster.wait_ready()
        try:
            self._client = Client(
                ready.front_address,
                seed=seed,
                label="LLM",
                key_file=ready.key_file,
                recovery_s=config.recovery_s,
                is_over=lambda: not cluster.is_alive,
            )
        except BaseException:
            cluster.end()
            raise
        self._cluster, self._key_file = cluster, ready.key_file
        # Also at the interpreter's end, and if nobody holds this any more.
        self._closer = weakref.finalize(self, _close, self._client, cluster)

    @property
    def key_file(self) -> str:
        """What another client of an encrypted tcp:// address needs; empty: nothing."""
        return self._key_file

    @property
    def client(self) -> Client:
        """For streaming, handles and status.

        Raises:
            ClientClosed: `close` was called.
            EngineLost: the cluster ended by itself.
        """
        if not self._closer.alive:
            raise ClientClosed("this LLM was closed, and its cluster has ended. Make a new LLM")
        if not self._cluster.is_alive:
            raise EngineLost(
                f"the cluster of this LLM has ended ({self._cluster.wait()}); its log says why. "
                "Make a new LLM"
            )
        return self._client

    @property
    def address(self) -> str:
        """Where other clients can dial."""
        return self._client.address

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults, which hold where no sampling parameters are given."""
        return self.client.get_default_sampling_params()

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if it has none."""
        return self.client.get_tokenizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, in their order; see `Client.generate`.

        Args:
            use_tqdm: show a progress bar, if standard error is a terminal.
        """
        with answers_bar(len(listed_prompts(prompts)), is_wanted=use_tqdm) as tell:
            return self.client.generate(
                prompts,
                sampling_params,
                priority=priority,
                cache_salt=cache_salt,
                timeout_s=timeout_s,
                on_answer=tell,
            )

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        template: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; see `Client.chat`."""
        with answers_bar(len(listed_chats(messages)), is_wanted=use_tqdm) as tell:
            return self.client.chat(
                messages,
                sampling_params,
                priority=priority,
                cache_salt=cache_salt,
                timeout_s=timeout_s,
                on_answer=tell,
                template=template,
            )

    def close(self) -> None:
        """Cancel what is live and end the cluster. May be called twice."""
        self._closer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def with_model_at_hand(config: EngineConfig) -> EngineConfig:
    """The settings with the model's folder, fetched or converted first where it must be.

    Done here, not by the cluster, so that a user sees a long download.
    """
    from cluster.models import DEFAULT_MODEL, resolve_model  # loads GGUF's reader

    folder = resolve_model(config.model, Path(config.models_dir), report=_report)
    if config.model in (None, DEFAULT_MODEL):
        return config  # which finds it at once, and shows its name
    return msgspec.structs.replace(config, model=str(folder))


def _report(text: str) -> None:
    print(f"stoker: {text}", file=sys.stderr)


def _close(client: Client, cluster: ClusterProcess) -> None:
    try:
        client.close()
    finally:
        cluster.end()
