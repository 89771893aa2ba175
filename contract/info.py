"""What a worker is: its device, its model, its sizes."""

import secrets
from dataclasses import dataclass
from enum import Enum

from contract.limits import Limits
from contract.lora import LoraAdapter


class MemoryLevel(Enum):
    """How short the memory of a worker's device is; the numbers are those of the metrics."""

    OK = 0
    WARNING = 1
    """Running sequences continue, and no more are added."""
    CRITICAL = 2
    """Less must run, and soon."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served, with the limits that requests are checked against."""

    id: str
    """The name that requests use."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    structured_output: bool = False
    """Whether outputs can be made to have a form."""
    adapters: tuple[LoraAdapter, ...] = ()
    """In the order of their names."""
    directory: str = ""
    """Its directory, if an operator had it loaded; empty: it is the model of the worker's flags."""

    def __str__(self) -> str:
        """Show the fields in which the models of two workers may differ."""
        details = f"vocab_size {self.vocab_size}"
        if self.directory:
            details += f", from {self.directory}"
        if self.adapters:
            names = (f"{a.name!r} {a.digest.hex()[:8]}" for a in self.adapters)
            details += f", LoRA adapters {', '.join(names)}"
        return f"model {self.id!r} ({details})"


def new_instance_id() -> int:
    """Draw a 64-bit number that no other start of a worker has; never 0."""
    return 1 + secrets.randbelow(2**64 - 1)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker, as it describes itself when a scheduler attaches."""

    worker_id: str
    """Names it in logs and metrics."""
    device: str
    """For a person, such as "cpu" or "NVIDIA H200"."""
    model_id: str
    limits: Limits
    eos_token_ids: tuple[int, ...]
    block_bytes: int
    """Size of one block over all layers; 0: unknown."""
    dtype: str
    """Number format of weights and activations, such as "bfloat16"."""
    structured_output: bool = False
    """Whether outputs can be made to have a form."""
    directory: str = ""
    """As in `ModelInfo`."""
    swap_bytes_per_s: float = 0.0
    """How fast blocks move between device and host; 0: not measured."""
    prefill_tokens_per_s: float = 0.0
    """How fast prompts are computed; 0: not measured."""
    disk_bytes_per_s: float = 0.0
    """How fast blocks come from the disk; 0: not measured."""
    instance_id: int = 0
    """Tells this start of this worker, or this load of its model, from all others; 0: unknown."""
    takes_kv: bool = True
    """Whether other workers can read and write its host blocks, if there are any."""
    num_draft_tokens: int = 0
    """Most tokens that it guesses for a decoding row in a step; 0: it drafts none."""
    max_num_blocks: int | None = None
    """Most device blocks that it can be resized to; None: their number is fixed."""
    min_num_blocks: int = 1
    """Fewest that it can be resized to."""
    host_is_device_memory: bool = False
    """Whether host blocks take from the memory that device blocks are in."""
    can_unload: bool = False
    """Whether it can give its device back, and take it again."""

    # At the worker only.
    kv_dtype: str = "auto"
    """What K and V are stored in; auto is `dtype`."""
    host_block_bytes: int = 0
    """Size of one block in the host, as its codec packs it; 0: as on the device."""
    host_codec: str = "none"

    @property
    def model(self) -> ModelInfo:
        """The model that it holds."""
        return ModelInfo(
            id=self.model_id,
            max_model_len=self.limits.max_model_len,
            vocab_size=self.limits.vocab_size,
            eos_token_ids=self.eos_token_ids,
            structured_output=self.structured_output,
            adapters=tuple(sorted(self.limits.adapters, key=lambda adapter: adapter.name)),
            directory=self.directory,
        )

    @property
    def kv_format(self) -> str:
        """The parts of the host blocks' format in which two workers of one model may differ."""
        size = f"{self.limits.block_size} tokens, {self.host_block_bytes or self.block_bytes} bytes"
        return f"{self.dtype}, KV {self.kv_dtype}, codec {self.host_codec}, {size}"
