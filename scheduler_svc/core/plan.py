"""Builds the plan of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array, ints
from contract.hashing import BlockHash
from contract.step import NewSequence, Plan, StepId
from scheduler_svc.core.interface.events import Preempted, Started
from scheduler_svc.core.space.blocks import DeviceBlockId, DiskBlockId, HostBlockId


@dataclass(slots=True)
class PlanBuilder:
    """Collects the lists that become the arrays of a `Plan`."""

    step_id: StepId
    now: float
    num_decodes: int
    new_sequences: list[NewSequence] = field(default_factory=list)
    appended_rows: list[int] = field(default_factory=list)
    appended_blocks: list[DeviceBlockId] = field(default_factory=list)
    placements: Sequence[int] = ()
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
    """Blocks of `copy_src` whose references pass to the step, which holds them until its result
    arrives."""
    renamed_src: list[DeviceBlockId] = field(default_factory=list)
    renamed_dst: list[DeviceBlockId] = field(default_factory=list)
    chunk_lens: dict[int, int] = field(default_factory=dict)
    """Maps each row with a chunk to the number of tokens in the chunk."""
    pins: tuple[tuple[BlockHash, float], ...] = ()
    trace_events: tuple[Started | Preempted, ...] = ()

    def copy(self, src: DeviceBlockId, dst: DeviceBlockId) -> None:
        """Copy a block before the step computes.

        The worker reads the sources of all copies of the step before it writes any destination.
        """
        self.copy_src.append(src)
        self.copy_dst.append(dst)

    def add_chunk(self, row: int, num_tokens: int) -> None:
        """Let the step compute `num_tokens` more known tokens of the sequence that has `row`."""
        self.chunk_lens[row] = self.chunk_lens.get(row, 0) + num_tokens

    def finish(
        self, released_rows: list[int], labels: tuple[Int32Array, npt.NDArray[np.uint8]]
    ) -> Plan:
        return Plan(
            step_id=self.step_id,
            released_rows=ints(released_rows),
            new_sequences=tuple(self.new_sequences),
            appended_rows=ints(self.appended_rows),
            appended_block_ids=ints(self.appended_blocks),
            placements=ints(self.placements),
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
            trace_events=self.trace_events,
        )
