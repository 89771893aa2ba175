"""The plan of a step while the scheduler fills it in."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array, ints
from contract.hashing import BlockHash
from contract.step import NewSequence, Plan, StepId
from scheduler_svc.core.blocks import DeviceBlockId, DiskBlockId, HostBlockId
from scheduler_svc.core.events import Preempted, Started
from scheduler_svc.core.sequence import Sequence


@dataclass(slots=True)
class PlanBuilder:
    """The lists behind the arrays of a `Plan`."""

    step_id: StepId
    now: float
    num_decodes: int
    budget: int
    """Tokens this step may still compute."""
    new_sequences: list[NewSequence] = field(default_factory=list)
    appended_rows: list[int] = field(default_factory=list)
    appended_blocks: list[DeviceBlockId] = field(default_factory=list)
    swap_out_src: list[DeviceBlockId] = field(default_factory=list)
    swap_out_dst: list[HostBlockId] = field(default_factory=list)
    swap_in_src: list[HostBlockId] = field(default_factory=list)
    swap_in_dst: list[DeviceBlockId] = field(default_factory=list)
    disk_store_src: list[HostBlockId] = field(default_factory=list)
    disk_store_dst: list[DiskBlockId] = field(default_factory=list)
    disk_load_src: list[DiskBlockId] = field(default_factory=list)
    disk_load_dst: list[HostBlockId] = field(default_factory=list)
    copy_src: list[DeviceBlockId] = field(default_factory=list)
    copy_dst: list[DeviceBlockId] = field(default_factory=list)
    copied: list[DeviceBlockId] = field(default_factory=list)
    """Those of `copy_src` to which the step takes over a reference, until it is answered."""
    renamed_src: list[DeviceBlockId] = field(default_factory=list)
    renamed_dst: list[DeviceBlockId] = field(default_factory=list)
    chunk_lens: dict[int, int] = field(default_factory=dict)
    """By row."""
    long_prefills: list[Sequence] = field(default_factory=list)
    """Those that have left a part of the budget to others, and may have what these do not use."""

    pins: tuple[tuple[BlockHash, float], ...] = ()
    turns: tuple[Started | Preempted, ...] = ()
    paced_budget: int | None = None
    """Tokens of prompts this step may still compute; None: as many as there is budget for."""

    def copy(self, src: DeviceBlockId, dst: DeviceBlockId) -> None:
        """Copy a block before the step computes; all copies read before any writes."""
        self.copy_src.append(src)
        self.copy_dst.append(dst)

    @property
    def prompt_budget(self) -> int:
        """Tokens of prompts this step may still compute."""
        return self.budget if self.paced_budget is None else min(self.budget, self.paced_budget)

    def room_for(self, seq: Sequence) -> int:
        """Return how many known tokens of `seq` this step may still compute."""
        return self.prompt_budget if _is_prompt(seq) else self.budget

    def add_chunk(self, seq: Sequence, num_tokens: int) -> None:
        """Compute `num_tokens` (more) known tokens of a running sequence, as there is room for."""
        assert seq.row is not None
        self.chunk_lens[seq.row] = self.chunk_lens.get(seq.row, 0) + num_tokens
        self.budget -= num_tokens
        if self.paced_budget is not None and _is_prompt(seq):
            self.paced_budget -= num_tokens

    def finish(
        self, released_rows: list[int], labels: tuple[Int32Array, npt.NDArray[np.uint8]]
    ) -> Plan:
        """Return the plan."""
        return Plan(
            step_id=self.step_id,
            released_rows=ints(released_rows),
            new_sequences=tuple(self.new_sequences),
            appended_rows=ints(self.appended_rows),
            appended_block_ids=ints(self.appended_blocks),
            copy_src_block_ids=ints(self.copy_src),
            copy_dst_block_ids=ints(self.copy_dst),
            chunk_rows=ints(list(self.chunk_lens)),
            chunk_lens=ints(list(self.chunk_lens.values())),
            num_decodes=self.num_decodes,
            swap_out_src_block_ids=ints(self.swap_out_src),
            swap_out_dst_block_ids=ints(self.swap_out_dst),
            swap_in_src_block_ids=ints(self.swap_in_src),
            swap_in_dst_block_ids=ints(self.swap_in_dst),
            renamed_src_block_ids=ints(self.renamed_src),
            renamed_dst_block_ids=ints(self.renamed_dst),
            disk_store_src_block_ids=ints(self.disk_store_src),
            disk_store_dst_block_ids=ints(self.disk_store_dst),
            disk_load_src_block_ids=ints(self.disk_load_src),
            disk_load_dst_block_ids=ints(self.disk_load_dst),
            labelled_block_ids=labels[0],
            labels=labels[1],
            pins=self.pins,
            turns=self.turns,
        )


def _is_prompt(seq: Sequence) -> bool:
    """Whether what it computes is to be paced; a single token costs what a decode does.

    Such are a search's beams, and what comes back from the host or forks.
    """
    return seq.num_tokens_left > 1
