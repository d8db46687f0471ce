"""Settings of a whole cluster but for those of HTTP; made and checked by `cluster.config`."""

from typing import Annotated, Literal

from msgspec import Struct
from msgspec.structs import replace

from cluster.setting import (
    AtLeastOne,
    NotNegative,
    OneOrTwo,
    Positive,
    Share,
    ShareBelowOne,
    TimeOrNone,
    setting,
)
from scheduler.config import SchedulerConfig
from scheduler.errors import ConfigError


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole cluster: model, groups, memory, queues, sockets, limits in time.

    Use `cluster.config`, which checks; each field's text is what `--help` shows.
    """

    model: Annotated[
        str | None,
        setting("Folder, GGUF file, `smollm2`, or Hugging Face name of the model."),
    ] = None
    models_dir: Annotated[str, setting("Where fetched and converted models are kept.")] = "models"
    chat_template: Annotated[
        str, setting("Jinja file that renders chats, instead of the model's own template.")
    ] = ""

    tensor_parallel_size: Annotated[
        AtLeastOne, setting("Ranks that share each layer of one replica of the model.")
    ] = 1
    pipeline_parallel_size: Annotated[
        AtLeastOne,
        setting("Stages that one replica's layers are dealt to, tensor_parallel_size ranks each."),
    ] = 1
    num_groups: Annotated[
        AtLeastOne, setting("Replicas of the model, each with its own KV pool.")
    ] = 1
    min_groups: Annotated[
        AtLeastOne | None,
        setting("Fewest groups when load decides. Default: as many as at the start."),
    ] = None
    max_groups: Annotated[
        AtLeastOne | None,
        setting(
            "Most groups while it runs; memory and cores of CPU hosts are dealt out for so many. "
            "With more than min_groups, load decides. Default: num_groups on CPUs, else any."
        ),
    ] = None
    backend: Annotated[
        Literal["ray", "local"], setting("Who starts the workers: Ray, or plain processes here.")
    ] = "ray"
    ray_address: Annotated[
        str, setting("HOST:PORT of a running Ray, or `auto`. Default: a Ray of our own, here.")
    ] = ""
    room_timeout_s: Annotated[
        TimeOrNone,
        setting(
            "With ray_address: how long nodes may take to join if those that are there have too "
            "little room for all ranks."
        ),
    ] = 30.0
    worker_env: Annotated[
        tuple[str, ...],
        setting(
            "With ray_address: name of an environment variable, or PREFIX*, that workers on other "
            "nodes get from here unless their node has its own. Default: HF_*, NCCL_*, GLOO_*, "
            "OMP_*."
        ),
    ] = ("HF_*", "NCCL_*", "GLOO_*", "OMP_*")
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        setting("What ranks compute on; auto: GPUs where this host has some."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        setting("Of weights; auto: the checkpoint's own."),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8"],
        setting("Of K/V; auto: as dtype. int8 (CPUs) holds nearly 4x float32's tokens."),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        setting("int8: a byte per weight, made from any checkpoint while it loads; CPUs only."),
    ] = "none"
    ops: Annotated[
        Literal["auto", "reference", "cpu", "cuda"],
        setting("Set of operations; auto: the device's fast one."),
    ] = "auto"
    enforce_eager: Annotated[
        bool, setting("On GPUs, no CUDA graphs: a faster start, slower decode steps.")
    ] = False
    warm_weights: Annotated[
        bool,
        setting(
            "On CPUs, keep each host's packed weights once, for all groups there and for ranks "
            "that are started again. Off: each rank reads and holds its own."
        ),
    ] = True
    num_threads: Annotated[
        AtLeastOne | None, setting("CPU threads of each rank. Default: its share of the cores.")
    ] = None
    pin_cores: Annotated[bool, setting("Keep each CPU rank on its own cores.")] = True

    max_model_len: Annotated[
        AtLeastOne | None, setting("Most tokens of a sequence. Default: what the model says.")
    ] = None
    block_size: Annotated[
        AtLeastOne, setting("Tokens per KV block. More: coarser prefix reuse, more waste.")
    ] = 16
    gpu_memory_utilization: Annotated[
        Share, setting("Share of the device's memory (CPU: of the free memory) to use.")
    ] = 0.8
    kv_cache_memory_bytes: Annotated[
        AtLeastOne | None, setting("KV memory of each rank, instead of what the share leaves.")
    ] = None
    num_kv_blocks: Annotated[
        AtLeastOne | None, setting("KV blocks of each group, taken as said, instead of either.")
    ] = None
    enable_prefix_caching: Annotated[bool, setting("Reuse K/V of equal prefixes.")] = True

    max_num_seqs: Annotated[
        AtLeastOne,
        setting("Sequences that run at once in a group. More: throughput, longer steps."),
    ] = 256
    max_num_batched_tokens: Annotated[
        AtLeastOne | None,
        setting(
            "Tokens computed per step. More: prompts start sooner, streams stutter. "
            "Default: 512 on CPUs, 2048 on GPUs."
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        NotNegative, setting("Most tokens of one prompt per step; 0: what is left of the step.")
    ] = 0
    scheduling_policy: Annotated[Literal["fcfs", "priority"], setting("Who starts next.")] = "fcfs"
    priority_ageing_s: Annotated[
        Positive, setting("Waiting this long is worth one level of priority.")
    ] = 10.0
    max_waiting_requests: Annotated[
        AtLeastOne, setting("More are refused at once. More: a longer queue.")
    ] = 4096
    max_waiting_tokens: Annotated[
        AtLeastOne, setting("Prompt tokens in the queue above which requests are refused.")
    ] = 4_194_304
    max_queue_s: Annotated[
        TimeOrNone | None,
        setting(
            "Requests that would wait longer for their turn are refused at once. Less: first "
            "tokens stay prompt under overload. Default: the two limits above alone."
        ),
    ] = None
    max_plans_in_flight: Annotated[
        OneOrTwo, setting("Steps sent ahead of their answers. 1 is for debugging.")
    ] = 2
    watermark: Annotated[
        ShareBelowOne, setting("Share of blocks left idle at admission. More: fewer preemptions.")
    ] = 0.02
    max_head_bypasses: Annotated[
        NotNegative, setting("Smaller requests that may start before a blocked first one.")
    ] = 32
    exclusive_phases: Annotated[
        bool, setting("Steps hold prompts or streams, never both; for comparisons.")
    ] = False

    front_address: Annotated[
        str, setting("Where clients dial: tcp://HOST:PORT (0: any) or ipc://PATH.")
    ] = ""
    back_address: Annotated[
        str, setting("Where workers dial; tcp:// if they are on other hosts.")
    ] = ""
    encrypt: Annotated[
        bool,
        setting("Encrypt tcp:// sockets and let in only holders of the keys made at the start."),
    ] = True
    key_file: Annotated[
        str,
        setting(
            "File, written at the start for its owner alone, that clients of an encrypted "
            "front_address need. Default: one that the start names, gone at the end."
        ),
    ] = ""
    socket_dir: Annotated[
        str,
        setting("Folder for the private folder of ipc:// sockets. Default: the temporary one."),
    ] = ""
    client_queue: Annotated[
        AtLeastOne, setting("Messages that may wait for a client before it is cut off.")
    ] = 1000

    start_timeout_s: Annotated[Positive, setting("Longest time from launch to ready.")] = 300.0
    step_timeout_s: Annotated[
        Positive, setting("A group that leaves a step unanswered for this long is lost.")
    ] = 60.0
    peer_timeout_s: Annotated[
        Positive, setting("Silence after which a tcp:// connection counts as dead.")
    ] = 10.0
    recovery_s: Annotated[
        TimeOrNone,
        setting(
            "How long requests whose engine is gone wait for another one, behind the tokens that "
            "clients have. 0: they fail at once."
        ),
    ] = 60.0
    drain_s: Annotated[
        TimeOrNone, setting("Time that running requests get when asked to stop.")
    ] = 0.0
    handover: Annotated[
        bool,
        setting(
            "SIGTERM replaces every process by one with the code that is installed now, as "
            "`stoker upgrade` and SIGUSR2 do, and no request ends; SIGINT ends the cluster."
        ),
    ] = False
    stop_timeout_s: Annotated[
        Positive, setting("Longest time of each part of stopping before it is killed.")
    ] = 5.0
    max_restarts: Annotated[
        NotNegative,
        setting("Restarts in a row of a lost group; 0: it stays lost, and its streams with it."),
    ] = 3
    poison_after: Annotated[
        NotNegative,
        setting(
            "Failures of a group that a request can cause, after which one that was computed each "
            "time and got no further in between is given up; ends of the engine core, after which "
            "one that was there is taken up alone. 0: never."
        ),
    ] = 2
    no_workers_s: Annotated[
        TimeOrNone,
        setting(
            "How long requests without a token wait while no group serves but one may come back."
        ),
    ] = 30.0

    longest_restart_pause_s: Annotated[
        TimeOrNone,
        setting(
            "A lost group waits before it restarts: 1 s, then twice as long, up to this. An engine "
            "core that ends again and again does so from 0.25 s on."
        ),
    ] = 30.0
    takeover_s: Annotated[
        TimeOrNone,
        setting(
            "How long ranks that have their weights wait for another engine when theirs is gone, "
            "and that engine for them; 0: they end."
        ),
    ] = 30.0
    max_engine_restarts: Annotated[
        NotNegative,
        setting("Restarts in a row of an engine that died or hung; 0: the cluster ends with it."),
    ] = 3
    engine_hang_s: Annotated[
        TimeOrNone,
        setting(
            "Silence of the engine's own loop after which it is killed and started again; 0: it "
            "is waited for."
        ),
    ] = 20.0
    allow_chaos: Annotated[
        bool,
        setting("Let any client break this cluster on purpose (`stoker chaos`). For tests only."),
    ] = False

    journal: Annotated[str, setting("File for one record per step, for replay. Default: none.")] = (
        ""
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], setting("Least important event shown.")
    ] = "info"

    @property
    def ranks_per_group(self) -> int:
        """Worker processes of each group; rank = stage * tensor_parallel_size + its place there."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def keeps_weights(self) -> bool:
        """Whether hosts keep packed weights; of a resolved config."""
        return self.warm_weights and self.device == "cpu" and self.ops != "reference"

    @property
    def most_groups(self) -> int:
        """For which memory and cores of a host are dealt out."""
        return self.max_groups or self.num_groups

    @property
    def num_ranks(self) -> int:
        """Worker processes of all groups."""
        return self.num_groups * self.ranks_per_group

    def resolved(self, *, has_gpu: bool) -> "EngineConfig":
        """The same with what depends on the machine filled in: the device, and the step's size.

        Raises:
            ConfigError: a device that is not there, or settings that do not fit together.
        """
        if self.device == "cuda" and not has_gpu and not self.ray_address:
            raise ConfigError(
                "device=cuda, but this host has no NVIDIA driver. Use device=cpu, or a host "
                "with a GPU, or name the Ray whose nodes have some (ray_address)"
            )
        device = self.device if self.device != "auto" else ("cuda" if has_gpu else "cpu")
        self._check_groups()
        if self.quantization != "none" and (device == "cuda" or self.ops == "reference"):
            raise ConfigError(
                f"quantization={self.quantization} is made by the CPU's own operations, but "
                f"device={device} and ops={self.ops}. Use quantization=none, or device=cpu with "
                "ops=auto"
            )
        tokens = self.max_num_batched_tokens
        if tokens is None:
            tokens = max(2048 if device == "cuda" else 512, self.max_num_seqs)
        config = replace(self, device=device, max_num_batched_tokens=tokens)
        config.scheduler_config()
        return config

    def _check_groups(self) -> None:
        least = self.min_groups or self.num_groups
        most = self.max_groups or max(least, self.num_groups)
        if not least <= self.num_groups <= most:
            raise ConfigError(
                f"num_groups={self.num_groups} must be from min_groups={least} to "
                f"max_groups={most}: it is how many there are at the start"
            )

    def scheduler_config(self) -> SchedulerConfig:
        """The scheduler's part of a resolved config.

        Raises:
            ConfigError: settings that do not fit together.
        """
        assert self.max_num_batched_tokens is not None, "resolved comes first"
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=self.scheduling_policy,
            priority_ageing_s=self.priority_ageing_s,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_plans_in_flight=self.max_plans_in_flight,
            num_stages=self.pipeline_parallel_size,
            watermark=self.watermark,
            max_head_bypasses=self.max_head_bypasses,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            max_queue_s=self.max_queue_s,
            poison_after=self.poison_after,
            exclusive_phases=self.exclusive_phases,
        )
