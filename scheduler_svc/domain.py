"""What the scheduler's shell speaks about, beyond what its core decides."""

from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from contract.lora import LoraAdapter
from scheduler_svc.core.compact.defragment import DefragmentationReport
from scheduler_svc.core.request import Request, SeqKey, SourceId


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
    """A request that an engine is to take on."""

    request: Request
    was_accepted: bool = False
    """Whether it was live before, so that it can no longer be refused."""
    num_losses: int = 0
    """How many workers in a row were lost while they ran it, and it gained no token at them."""


@dataclass(frozen=True, slots=True)
class CancelSequences:
    """Sequences that their source wants to end early; unknown ones are ignored."""

    source: SourceId
    seq_keys: Sequence[SeqKey]


@dataclass(frozen=True, slots=True)
class DropSource:
    """A router's stream ended: all its sequences go, and nobody is told."""

    source: SourceId


@dataclass(frozen=True, slots=True, eq=False)
class DefragmentBlocks:
    """The held blocks are to be moved together; `done` is set when they are, or cannot be."""

    done: Future[DefragmentationReport]


Command: TypeAlias = SubmitRequest | CancelSequences | DropSource | DefragmentBlocks
"""What an engine is asked to do between two steps."""
