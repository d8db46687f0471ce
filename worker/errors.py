"""What goes wrong in a worker before or beside computing. Collectives have their own errors."""

from pathlib import Path


class ModelError(ValueError):
    """The model directory cannot be served; the message says what was found and wanted."""


class UnsupportedModel(ModelError):
    """The architecture, or a setting of it, is none that the decoder knows."""


class DamagedCheckpoint(ModelError):
    """A weight file is missing, truncated or not what the config describes.

    Attributes:
        file: the file to look at.
        tensor: the tensor in it, if it is about one.
    """

    def __init__(self, file: Path, problem: str, *, tensor: str | None = None) -> None:
        named = f"{file}: tensor {tensor!r}" if tensor else str(file)
        super().__init__(f"{named}: {problem}")
        self.file, self.tensor = file, tensor


class UnfitWeights(RuntimeError):
    """Weights that another process of this host has offered cannot be used; read them anew."""


class PoolTooSmall(ValueError):
    """The KV memory does not hold one request of `max_model_len`.

    Attributes:
        wanted_bytes: the least KV memory that would do.
        found_bytes: what there is.
    """

    def __init__(
        self, *, wanted_bytes: int, found_bytes: int, max_model_len: int, token_bytes: int
    ) -> None:
        fitting = max(found_bytes, 0) // token_bytes
        super().__init__(
            f"one request of max_model_len={max_model_len} tokens needs {_mib(wanted_bytes)} of "
            f"KV memory per rank, but {_mib(found_bytes)} are left (room for {fitting} tokens). "
            f"Raise kv_cache_memory_bytes to at least {wanted_bytes} or raise "
            "gpu_memory_utilization, free memory, use more ranks, or lower max_model_len."
        )
        self.wanted_bytes, self.found_bytes = wanted_bytes, found_bytes


class PoolTooLarge(ValueError):
    """The KV memory that was asked for is more than the device has free.

    Attributes:
        wanted_bytes: what was asked for.
        free_bytes: what there is.
    """

    def __init__(self, setting: str, *, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"{setting} asks for {_mib(wanted_bytes)} of KV memory per rank, but only "
            f"{_mib(free_bytes)} are free beside the weights. Lower it, or leave it out: then as "
            "much is taken as gpu_memory_utilization allows."
        )
        self.wanted_bytes, self.free_bytes = wanted_bytes, free_bytes


class ProtocolError(RuntimeError):
    """A plan does not follow from the ones before it, or names what is not there.

    The worker's mirror is then worthless: the group must be restarted.
    """


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
