"""Values that packages of the scheduler pass to each other, such as commands to a core."""

from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from contract.lora import DIGEST_BYTES, LoraAdapter
from scheduler_svc.core.compact.defragment import DefragmentationReport
from scheduler_svc.core.interface.events import Finished
from scheduler_svc.core.interface.request import FinishReason, Request, SeqKey, SourceId


@dataclass(frozen=True, slots=True, eq=False)
class SubmitRequest:
    """Submit a request to a core."""

    request: Request
    was_accepted: bool = False
    """Whether a core has accepted the request before. Such a request is not refused: if this core
    cannot run it, the request's sequences end with an error."""
    num_crashes: int = 0
    """How many successive workers were lost while they ran the request, before they had added a
    token to it."""


@dataclass(frozen=True, slots=True)
class CancelSequences:
    """Cancel sequences; unknown keys are ignored."""

    source: SourceId
    seq_keys: Sequence[SeqKey]


@dataclass(frozen=True, slots=True)
class DropSource:
    """Cancel all sequences of a router's stream that has ended; send no events about them."""

    source: SourceId


@dataclass(frozen=True, slots=True)
class UnpinPrompt:
    """Drop the pins of a request's prompt."""

    tenant: str
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class DefragmentBlocks:
    """Run a pass of defragmentation; `done` receives its report."""

    done: Future[DefragmentationReport]


Command: TypeAlias = SubmitRequest | CancelSequences | DropSource | UnpinPrompt | DefragmentBlocks
"""A command that a session applies to its core between two steps."""


ADAPTERS_SALT = "\0"
"""Prefix of the cache salts of all requests with an adapter. No client's own salt can have it."""


def adapter_salt(adapter: LoraAdapter) -> str:
    """Return the beginning of the cache salts of all requests with `adapter`.

    The salts of two adapters differ, so requests share KV only if they use the same adapter.
    """
    return f"{ADAPTERS_SALT}{adapter.digest.hex()}{adapter.name}\0"


def split_salt(salt: str) -> tuple[str, str]:
    """Split a cache salt into the name of the request's adapter (empty: none) and the rest."""
    if not salt.startswith(ADAPTERS_SALT):
        return "", salt
    name, _, rest = salt[len(ADAPTERS_SALT) + 2 * DIGEST_BYTES :].partition("\0")
    return name, rest


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
    """Return the events that end the live sequences of `request` with the message `error`."""
    return tuple(
        Finished(request.source, key, FinishReason.ERROR, error=error)
        for key in live_seq_keys(request)
    )
