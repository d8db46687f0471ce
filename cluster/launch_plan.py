"""What the engine and each worker are told, worked out of one config and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.backend import Place, Rendezvous, RunnerSpec, WorkerLaunch
from cluster.engine_config import EngineConfig
from cluster.engine_launch import EngineLaunch, GroupEpoch
from cluster.errors import BackendError
from cluster.keys import SocketKeys

COLLECTIVE_SHARE = 0.8
"""Of the step's time limit, for one collective: ranks that wait for another say which one it
is before the engine says that the step is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One start of one cluster."""

    config: EngineConfig
    """Resolved for this host."""
    model: str
    """The name that clients see."""
    model_dir: Path
    engine_id: str
    key: str
    """The secret between the engine and its workers."""
    cores: tuple[int, ...]
    """That this process may use."""
    front_keys: SocketKeys | None = None
    back_keys: SocketKeys | None = None
    """None: the socket is not encrypted."""

    def engine(
        self,
        front_address: str,
        back_address: str,
        *,
        epochs: tuple[GroupEpoch, ...] = (),
        num_wanted: int | None = None,
        number: int = 1,
        num_restarts: int = 0,
        last_loss: str = "",
        drained_nodes: tuple[str, ...] = (),
    ) -> EngineLaunch:
        """The first engine's launch, or that of one that comes after another.

        Args:
            epochs, number, num_restarts, last_loss, drained_nodes: as of `EngineLaunch`.
            num_wanted: groups that the one before was to have.
        """
        config = self.config
        return EngineLaunch(
            engine_id=self.engine_id,
            key=self.key,
            model=self.model,
            model_dir=str(self.model_dir),
            models_dir=config.models_dir,
            chat_template=config.chat_template,
            front_address=front_address,
            back_address=back_address,
            num_groups=num_wanted or config.num_groups,
            number=number,
            num_restarts=num_restarts,
            epochs=epochs,
            last_loss=last_loss,
            drained_nodes=drained_nodes,
            takeover_s=config.takeover_s,
            min_groups=config.min_groups or config.num_groups,
            max_groups=self._max_groups,
            drain_s=config.drain_s,
            num_ranks=config.ranks_per_group,
            is_one_host=not (config.backend == "ray" and config.ray_address),
            scheduler=config.scheduler_config(),
            start_timeout_s=config.start_timeout_s,
            step_timeout_s=config.step_timeout_s,
            peer_timeout_s=config.peer_timeout_s,
            no_workers_s=config.no_workers_s,
            max_restarts=config.max_restarts,
            client_queue=config.client_queue,
            front_keys=None if self.front_keys is None else self.front_keys.server,
            back_keys=None if self.back_keys is None else self.back_keys.server,
            longest_restart_pause_s=config.longest_restart_pause_s,
            allow_chaos=config.allow_chaos,
            journal=config.journal,
            log_level=config.log_level,
        )

    def workers(
        self, back_address: str, group: int, epoch: int, places: Sequence[Place]
    ) -> list[WorkerLaunch]:
        """One launch per place.

        Raises:
            BackendError: the ranks are on several hosts, and the engine listens on one only.
        """
        names = sorted({place.node for place in places})
        is_one_host = len(names) == 1
        if not is_one_host and back_address.startswith("ipc://"):
            raise BackendError(
                f"the ranks of group {group} are on several hosts "
                f"({', '.join(sorted({place.host for place in places}))}) and cannot dial "
                f"{back_address}. Set back_address=tcp://HOST:0 with an address of this host"
            )
        return [
            WorkerLaunch(
                engine_id=self.engine_id,
                key=self.key,
                address=back_address,
                group=group,
                epoch=epoch,
                rank=place.rank,
                num_ranks=len(places),
                pipeline_parallel_size=self.config.pipeline_parallel_size,
                runner=self._runner(place, places),
                rendezvous=Rendezvous(
                    name=f"stoker-{self.engine_id}-{group}-{epoch}",
                    is_one_host=is_one_host,
                    hosts=tuple(place.host for place in places),
                    nodes=() if is_one_host else tuple(names.index(p.node) for p in places),
                    start_timeout_s=self.config.start_timeout_s,
                    timeout_s=COLLECTIVE_SHARE * self.config.step_timeout_s,
                ),
                cores=place.cores if self._pins_cores else (),
                gpu=place.gpu,
                engine_timeout_s=self.config.peer_timeout_s,
                takeover_s=self.config.takeover_s,
                link_keys=None if self.back_keys is None else self.back_keys.client,
                allow_chaos=self.config.allow_chaos,
                keeper=place.keeper,
                log_level=self.config.log_level,
            )
            for place in places
        ]

    @property
    def _max_groups(self) -> int | None:
        """On CPUs each group has taken its share of the memory that was free at the start, unless
        it was told how much to take."""
        config = self.config
        if config.max_groups is not None:
            return config.max_groups
        is_told = config.kv_cache_memory_bytes is not None or config.num_kv_blocks is not None
        return None if is_told or config.device != "cpu" else config.num_groups

    @property
    def _pins_cores(self) -> bool:
        return self.config.pin_cores and self.config.device == "cpu"

    def _runner(self, place: Place, places: Sequence[Place]) -> RunnerSpec:
        config = self.config
        assert config.max_num_batched_tokens is not None
        on_host = place.ranks_on_host
        if on_host is None:
            on_host = sum(other.node == place.node for other in places) * config.most_groups
        share = len(place.cores) or max(1, len(self.cores) // on_host)
        return RunnerSpec(
            model_dir=str(self.model_dir),
            dtype=config.dtype,
            kv_cache_dtype=config.kv_cache_dtype,
            quantization=config.quantization,
            device=config.device,
            ops=config.ops,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            num_kv_blocks=config.num_kv_blocks,
            enforce_eager=config.enforce_eager,
            num_threads=config.num_threads or share,
            ranks_on_host=on_host,
        )
