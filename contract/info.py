"""Describes a worker: its device, its model and its sizes."""

import secrets
from dataclasses import dataclass
from enum import Enum, StrEnum

from contract.lora import LoraAdapter
from contract.pooling import ONLY_GENERATES, Abilities
from contract.worker_limits import Limits


class MemoryLevel(Enum):
    """How scarce the memory of a worker's device is. The metrics report these numbers."""

    OK = 0
    WARNING = 1
    """The scheduler may run only as many sequences as ran when the level rose."""
    CRITICAL = 2
    """The scheduler must soon reduce the number of running sequences."""


class Role(StrEnum):
    """Which part of a request the scheduler gives to a worker: the prompt, the output, or both.

    A worker of any role is able to compute prompts and outputs.
    """

    BOTH = "both"
    PREFILL = "prefill"
    """Computes prompts; then the requests move to another worker."""
    DECODE = "decode"
    """Decodes requests whose prompts other workers have computed."""

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model, with the limits that apply to requests."""

    id: str
    """The name that requests use."""
    max_model_len: int
    """The limit on tokens of prompt and output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    structured_output: bool = False
    """Whether requests may ask for structured output."""
    adapters: tuple[LoraAdapter, ...] = ()
    """The LoRA adapters that are loaded, sorted by name."""
    directory: str = ""
    """The directory of a model that an operator loaded; empty for the model that the worker started
    with."""
    abilities: Abilities = ONLY_GENERATES

    def __str__(self) -> str:
        """Describe the model for errors and logs that compare it with another model."""
        details = f"vocab_size {self.vocab_size}"
        if self.directory:
            details += f", from {self.directory}"
        if self.adapters:
            names = (f"{a.name!r} {a.digest.hex()[:8]}" for a in self.adapters)
            details += f", LoRA adapters {', '.join(names)}"
        return f"model {self.id!r} ({details})"


def new_instance_id() -> int:
    """Draw a random 64-bit number other than 0, to be a `WorkerInfo.instance_id`."""
    return 1 + secrets.randbelow(2**64 - 1)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker, as it describes itself when a scheduler attaches."""

    worker_id: str
    """The worker's name in logs and metrics."""
    device: str
    """The device's name for people, such as "cpu" or "NVIDIA H200"."""
    model_id: str
    limits: Limits
    eos_token_ids: tuple[int, ...]
    block_bytes: int
    """Size of one block in bytes, with all layers of its KV group; 0: unknown."""
    dtype: str
    """Number format of weights and activations, such as "bfloat16"."""
    structured_output: bool = False
    """As in `ModelInfo`."""
    directory: str = ""
    """As in `ModelInfo`."""
    swap_bytes_per_s: float = 0.0
    """Measured rate of copies between device and host; 0: not measured."""
    prefill_tokens_per_s: float = 0.0
    """Measured rate of prefill; 0: not measured."""
    disk_bytes_per_s: float = 0.0
    """Measured rate of reading blocks from the disk; 0: not measured."""
    instance_id: int = 0
    """A random number that the worker draws each time it loads a model; 0: unknown."""
    takes_kv: bool = True
    """Whether the worker exchanges contents of host blocks with other workers."""
    num_draft_tokens: int = 0
    """The limit on draft tokens of a decoding row in one step; 0: the worker drafts none."""
    max_num_blocks: int | None = None
    """The greatest number of device blocks that a resize may set; None: the number is fixed."""
    min_num_blocks: int = 1
    """The least number of device blocks that a resize may set."""
    host_is_device_memory: bool = False
    """Whether host blocks and device blocks share one memory, as on a CPU."""
    can_unload: bool = False
    """Whether the worker can unload its model, which frees the device, and then load a model."""
    takes_whole_prompts: bool = False
    """Whether each prompt must be computed in one step. True for encoders, which keep no KV."""
    role: Role = Role.BOTH
    has_far_kv: bool = False
    """Whether the worker stores blocks in a far tier and fetches them from there."""
    abilities: Abilities = ONLY_GENERATES

    # Set only at the worker; these fields are not sent to the scheduler.
    kv_dtype: str = "auto"
    """Number format of stored keys and values; "auto" is `dtype`."""
    host_block_bytes: int = 0
    """Size in bytes of one host block, packed by `host_codec`; 0: equal to `block_bytes`."""
    host_codec: str = "none"
    is_batch_invariant: bool = False
    """Whether a request's KV is the same, bit for bit, whatever other requests run at the time."""

    @property
    def model(self) -> ModelInfo:
        """The model that the worker holds."""
        return ModelInfo(
            id=self.model_id,
            max_model_len=self.limits.max_model_len,
            vocab_size=self.limits.vocab_size,
            eos_token_ids=self.eos_token_ids,
            structured_output=self.structured_output,
            adapters=tuple(sorted(self.limits.adapters, key=lambda adapter: adapter.name)),
            directory=self.directory,
            abilities=self.abilities,
        )

    @property
    def kv_format(self) -> str:
        """The format of host blocks. Two workers exchange KV only if their formats are equal."""
        size = f"{self.limits.block_size} tokens, {self.host_block_bytes or self.block_bytes} bytes"
        if self.limits.has_windows:
            size += f", windows {self.limits.kv_windows}"
        if self.is_batch_invariant:  # other devices would compute other bits
            size += f", batch-invariant on {self.device}"
        return f"{self.dtype}, KV {self.kv_dtype}, codec {self.host_codec}, {size}"
