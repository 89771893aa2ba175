"""The values that the scheduler's rooms exchange, beyond those of its core."""

from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from contract.lora import LoraAdapter
from scheduler_svc.core.compact.defragment import DefragmentationReport
from scheduler_svc.core.events import Finished
from scheduler_svc.core.request import FinishReason, Request, SeqKey, SourceId


@dataclass(frozen=True, slots=True, eq=False)
class SubmitRequest:
    """Take on a request."""

    request: Request
    was_accepted: bool = False
    """Whether it was live before; then it can no longer be refused."""
    num_crashes: int = 0
    """Consecutive workers that were lost while they ran it, without a token gained there."""


@dataclass(frozen=True, slots=True)
class CancelSequences:
    """End sequences early; unknown ones are ignored."""

    source: SourceId
    seq_keys: Sequence[SeqKey]


@dataclass(frozen=True, slots=True)
class DropSource:
    """A router's stream has ended: cancel all its sequences silently."""

    source: SourceId


@dataclass(frozen=True, slots=True, eq=False)
class DefragmentBlocks:
    """Move the held blocks together; `done` is set when that has ended."""

    done: Future[DefragmentationReport]


Command: TypeAlias = SubmitRequest | CancelSequences | DropSource | DefragmentBlocks
"""What a session applies to its core between two steps."""


ADAPTERS_SALT = "\0"
"""Prefix of the cache salts of all requests with an adapter. No client can choose such a salt."""


def adapter_salt(adapter: LoraAdapter) -> str:
    """Return the prefix of the cache salts of one adapter's requests: only they share its KV."""
    return f"{ADAPTERS_SALT}{adapter.digest.hex()}{adapter.name}\0"


def live_outputs(request: Request) -> list[int]:
    """Return the output indices of the sequences of `request` that have not ended."""
    outputs = request.outputs
    return [i for i in range(request.n) if not outputs or not outputs[i].finished]


def num_live_seqs(request: Request) -> int:
    """Return how many sequences of `request` have not ended."""
    return len(live_outputs(request))


def live_seq_keys(request: Request) -> list[SeqKey]:
    """Return the keys of the sequences of `request` that have not ended."""
    return [SeqKey(request.first_seq_key + index) for index in live_outputs(request)]


def end_with_error(request: Request, error: str) -> tuple[Finished, ...]:
    """Return the ends of those sequences, for `error`."""
    return tuple(
        Finished(request.source, key, FinishReason.ERROR, error=error)
        for key in live_seq_keys(request)
    )
