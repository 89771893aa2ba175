"""What the workers are doing, as `Client.describe_activity` gives it."""

from dataclasses import dataclass
from enum import StrEnum

from quire.client.types import Load


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that is done."""

    step_id: int
    """Strictly increasing at one worker."""
    answered_at_s: float
    """When its result came, in seconds since 1970."""
    execute_s: float
    rpc_s: float
    """From sending it to its result; steps overlap."""
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    """Sequences that held device blocks when it was planned."""
    num_waiting: int
    num_preemptions: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int


class MemoryLevel(StrEnum):
    """How short a worker's memory is; while it is, it has less run."""

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class WorkerActivity:
    """One worker; its totals begin anew when it is attached anew."""

    worker: str
    """Its target, as the scheduler was told."""
    attached_at_s: float
    """In seconds since 1970."""
    load: Load
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preemptions: int
    busy_s: float
    """Time it spent on its steps."""
    steps: tuple[StepRecord, ...]
    """The latest, in order."""
    memory_level: MemoryLevel = MemoryLevel.OK
    is_unloaded: bool = False
    """Whether its model is unloaded; then the other figures mean nothing."""
