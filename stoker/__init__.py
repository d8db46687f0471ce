"""The front door: `LLM`, `Client`, `AsyncClient`, `SamplingParams`, and the `stoker` command.

Names are loaded when first used, so that `from stoker import Client` loads neither torch nor
ray nor transformers.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.errors import AddressError, ModelError, StartFailed
    from cluster.frontend.errors import (
        ClientClosed,
        EngineLost,
        EngineUnreachable,
        NoWorkers,
        ProtocolMismatch,
        QueueFull,
        RequestError,
        RequestRefused,
        RequestTimedOut,
        ShuttingDown,
        WaitTimedOut,
    )
    from scheduler.errors import ConfigError, InvalidRequest
    from scheduler.sampling import SamplingParams
    from scheduler.structured import StructuredOutputs
    from stoker.async_client import AsyncClient, AsyncHandle
    from stoker.client import Client, Handle
    from stoker.llm import LLM
    from stoker.outputs import CompletionOutput, Logprob, Piece, RequestMetrics, RequestOutput

__all__ = [
    "LLM",
    "AddressError",
    "AsyncClient",
    "AsyncHandle",
    "Client",
    "ClientClosed",
    "CompletionOutput",
    "ConfigError",
    "EngineLost",
    "EngineUnreachable",
    "Handle",
    "InvalidRequest",
    "Logprob",
    "ModelError",
    "NoWorkers",
    "Piece",
    "ProtocolMismatch",
    "QueueFull",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestRefused",
    "RequestTimedOut",
    "SamplingParams",
    "ShuttingDown",
    "StartFailed",
    "StructuredOutputs",
    "WaitTimedOut",
]

_MODULES = {
    "cluster.errors": ("AddressError", "ModelError", "StartFailed"),
    "cluster.frontend.errors": (
        "ClientClosed",
        "EngineLost",
        "EngineUnreachable",
        "NoWorkers",
        "ProtocolMismatch",
        "QueueFull",
        "RequestError",
        "RequestRefused",
        "RequestTimedOut",
        "ShuttingDown",
        "WaitTimedOut",
    ),
    "scheduler.errors": ("ConfigError", "InvalidRequest"),
    "scheduler.sampling": ("SamplingParams",),
    "scheduler.structured": ("StructuredOutputs",),
    "stoker.async_client": ("AsyncClient", "AsyncHandle"),
    "stoker.client": ("Client", "Handle"),
    "stoker.llm": ("LLM",),
    "stoker.outputs": (
        "CompletionOutput",
        "Logprob",
        "Piece",
        "RequestMetrics",
        "RequestOutput",
    ),
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            value: object = getattr(import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
