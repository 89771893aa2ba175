"""Synchronous and asynchronous Python clients of the service.

    from quire.client import Client, SamplingParams

    with Client(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
        for event in client.generate("def add(", SamplingParams(max_tokens=64), resumable=True):
            ...

Every method may raise the service's errors, as classes of `contract.errors`: InvalidArgumentError,
TooBusyError (with `retry_after_s`), UnavailableError, and so on. `timeout_s` becomes the call's
deadline. `priority` (higher goes first) and `tenant` are for the scheduler's policy.

A client may know several routers of a service; it uses one router until that one fails. If the
router dies or the connection breaks, a stream with `resumable=True` pauses, and then continues
through the same router or another. With `retry=Retry()`, `generate` and `generate_once` also repeat
a request that is not resumable, if the service was too busy or unavailable and refused the request.
"""

from quire.client.async_client import AsyncClient
from quire.client.blocking_client import Client
from quire.client.retry import Retry
from quire.client.types import (
    DEFAULT_SAMPLING,
    BeamSearch,
    ChatMessage,
    Completion,
    Embeddings,
    Event,
    FinishReason,
    GenerateOptions,
    Load,
    Model,
    Output,
    OutputDelta,
    OutputError,
    OutputFinished,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from quire.v1.kv_pb2 import WorkerKv
from rpc.security.tls import ClientTls

__all__ = [
    "DEFAULT_SAMPLING",
    "AsyncClient",
    "BeamSearch",
    "ChatMessage",
    "Client",
    "ClientTls",
    "Completion",
    "Embeddings",
    "Event",
    "FinishReason",
    "GenerateOptions",
    "Load",
    "Model",
    "Output",
    "OutputDelta",
    "OutputError",
    "OutputFinished",
    "Retry",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
    "WorkerKv",
]
