"""The values that the scheduler's rooms exchange, beyond those of its core."""

from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler_svc.core.compact.defragment import DefragmentationReport
from scheduler_svc.core.plan import Finished
from scheduler_svc.core.request import FinishReason, Request, SeqKey, SourceId


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter that the workers hold."""

    name: str
    """What requests call it."""
    digest: bytes
    """Tells its contents from all others."""
    directory: str = field(default="", compare=False)
    """Where the workers find it; empty: not known."""

    def __str__(self) -> str:
        """Name it as far as two may differ."""
        return f"LoRA adapter {self.name!r} ({self.digest.hex()[:8]})"


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What was loaded."""

    adapter: LoraAdapter
    was_there: bool
    """Whether it had been loaded before."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that the workers hold, with the limits that requests are checked against."""

    id: str
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    structured_output: bool = False
    """Whether outputs can be made to have a form."""
    adapters: tuple[LoraAdapter, ...] = ()
    directory: str = ""
    """Where it is, if the worker was told to load it; empty: it is that of the worker's flags."""

    def __str__(self) -> str:
        """Name it as far as workers may differ in it."""
        details = f"vocab_size {self.vocab_size}"
        if self.directory:
            details += f", from {self.directory}"
        if self.adapters:
            names = (f"{a.name!r} {a.digest.hex()[:8]}" for a in self.adapters)
            details += f", LoRA adapters {', '.join(names)}"
        return f"model {self.id!r} ({details})"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself when it is attached."""

    worker_id: str
    device: str
    model: ModelInfo
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    num_saturating_tokens: int | None = None
    """How many prompt tokens keep its device busy; None: `max_num_batched_tokens`."""
    block_bytes: int = 0
    num_host_blocks: int = 0
    swap_bytes_per_s: float = 0.0
    """How fast blocks move between device and host; 0: not measured."""
    prefill_tokens_per_s: float = 0.0
    """How fast prompts are computed; 0: not measured."""
    num_disk_blocks: int = 0
    disk_bytes_per_s: float = 0.0
    """How fast blocks come from the disk; 0: not measured."""
    dtype: str = ""
    """Number format of its activations, and so of its KV."""
    instance_id: int = 0
    """Tells this start of this worker from all others; 0: not told."""
    takes_kv: bool = False
    """Whether it can give the contents of its host blocks to other workers, and take theirs."""
    num_draft_tokens: int = 0
    """Most tokens that it guesses for a decoding sequence in a step; 0: it drafts none."""
    max_num_blocks: int | None = None
    """Most device blocks that it can be resized to; None: their number is fixed."""
    min_num_blocks: int = 1
    """Fewest that it can be resized to."""
    host_is_device_memory: bool = False
    """Whether its host blocks are in the memory that its device blocks are in."""
    can_unload: bool = False
    """Whether it can give its device back, and take it again."""


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


@dataclass(frozen=True, slots=True)
class WantedBlocks:
    """A size for a KV pool, in blocks."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class WantedBytes:
    """A size for a KV pool: as many blocks as fit."""

    num_bytes: int


WantedSize: TypeAlias = WantedBlocks | WantedBytes


@dataclass(frozen=True, slots=True)
class ResizeProgress:
    """How far the resizing of a pool is."""

    num_blocks_before: int
    num_blocks: int
    """The size it will have."""
    num_leaving_blocks: int
    """Blocks that will go and are still held."""
    block_bytes: int
    """Size of a block; 0: not known."""


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
