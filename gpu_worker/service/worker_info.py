"""What a scheduler must know of this worker."""

import secrets
from dataclasses import dataclass, field

from contract.limits import Limits
from gpu_worker.memory.level import Level


def new_instance_id() -> int:
    """Draw a 64-bit number that no other start of a worker has; never 0."""
    return 1 + secrets.randbelow(2**64 - 1)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The worker: its device, its model, its room."""

    worker_id: str
    """Names it in logs and metrics."""
    device: str
    """For a person, such as "cpu" or "NVIDIA H200"."""
    model_id: str
    """The name that requests use."""
    limits: Limits
    eos_token_ids: tuple[int, ...]
    block_bytes: int
    """Of one block, over all layers."""
    dtype: str
    """Number format of weights and activations, such as "bfloat16"."""
    swap_bytes_per_s: float = 0.0
    """How fast blocks move between device and host; 0: not measured."""
    prefill_tokens_per_s: float = 0.0
    """How fast prompts are computed; 0: not measured."""
    disk_bytes_per_s: float = 0.0
    """How fast blocks come from the disk; 0: not measured."""

    structured_output: bool = False
    """Whether outputs can be made to have a form."""

    kv_dtype: str = "auto"
    """What K and V are stored in; auto is `dtype`."""
    host_block_bytes: int = 0
    """Of one block in the host, as its codec makes it; 0: as on the device."""
    host_codec: str = "none"
    """How the host holds blocks."""

    num_draft_tokens: int = 0
    """Most tokens that it guesses for a decoding row in a step; 0: it drafts none."""

    takes_kv: bool = True
    """Whether host blocks, if there are any, can be read and written by other workers."""
    max_num_blocks: int | None = None
    """Most device blocks that its pool can be resized to; None: its size is fixed."""
    min_num_blocks: int = 1
    """Fewest that it can be resized to."""
    host_is_device_memory: bool = False
    """Whether host blocks take from the memory that device blocks are in."""
    instance_id: int = field(default_factory=new_instance_id)
    """Tells this start of this worker, or this load of its model, from all others."""
    directory: str = ""
    """Where the model is, if it is another than the worker's flags name."""
    can_unload: bool = False
    """Whether it can give the device back, and take it again."""

    @property
    def kv_format(self) -> str:
        """What host blocks hold, as far as two workers of one model may differ."""
        size = f"{self.limits.block_size} tokens, {self.host_block_bytes or self.block_bytes} bytes"
        return f"{self.dtype}, KV {self.kv_dtype}, codec {self.host_codec}, {size}"


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What the worker holds at a moment."""

    epoch: int
    """The newest seen; 0 before any."""
    step_id: int
    """The last step executed in it; 0 before any."""
    num_rows_used: int
    has_scheduler: bool
    """Whether one has a stream of steps open."""
    memory_level: Level | None = None
    """How short the device's memory is; None: it is not watched."""
    is_unloaded: bool = False
    """Whether it has no model."""
