"""The disk of the fake worker: moves take several steps, end in any order, and may fail.

`KvCommands` of worker.proto defines which moves may run at once. A test sets how many moves end in
a step (`ends_per_step`), how many fail (`failure_rate`), and the random choice (`dice`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from tests.property.oracle import Context

Content = tuple[Context | None, ...]
"""A block's contents, slot by slot; None is a slot that was never written."""

BROKEN: Context = ("broken",)  # the worker detects the damage when it reads the block


@dataclass(frozen=True)
class Store:
    content: Content
    disk_block: int
    label: bytes | None


@dataclass(frozen=True)
class Load:
    disk_block: int
    host_block: int


@dataclass
class Ends:
    """The ended disk moves of a result, with the result's field names."""

    stored_disk_block_ids: list[int] = field(default_factory=list)
    failed_disk_block_ids: list[int] = field(default_factory=list)
    loaded_host_block_ids: list[int] = field(default_factory=list)
    failed_host_block_ids: list[int] = field(default_factory=list)


class FakeDisk:
    """Moves contents of blocks between the disk and `host`."""

    def __init__(
        self, num_blocks: int, host: dict[int, Content], host_labels: dict[int, bytes]
    ) -> None:
        self.num_blocks = num_blocks
        self.labels: dict[int, bytes] = {}
        self._host_labels = host_labels
        self.blocks: dict[int, Content] = {}
        self.moves: list[Store | Load] = []
        self.ends_per_step = 1
        self.dice = Random(0)
        self.failure_rate = 0.0
        self._host = host

    @property
    def loading(self) -> set[int]:
        """Host blocks that a load may write at any time."""
        return {move.host_block for move in self.moves if isinstance(move, Load)}

    def begin(self, stores: Iterable[tuple[int, int]], loads: Iterable[tuple[int, int]]) -> None:
        """Start a step's stores (host, disk) and loads (disk, host), before it writes the host."""
        for source, target in stores:
            assert 0 <= target < self.num_blocks
            assert source in self._host, "a store reads a host block that holds nothing"
            busy = {move.disk_block for move in self.moves}
            assert target not in busy, "a store writes a disk block that a move under way uses"
            self.blocks.pop(target, None)
            self.labels.pop(target, None)
            self.moves.append(Store(self._host[source], target, self._host_labels.get(source)))
        for source, target in loads:
            assert source in self.blocks, "a load reads a disk block that holds nothing"
            assert target not in self.loading, "two loads write one host block"
            self._host.pop(target, None)
            self._host_labels.pop(target, None)
            self.moves.append(Load(source, target))

    def end(self, at_least: int) -> Ends:
        """End some of the moves in progress, in any order."""
        ends = Ends()
        for _ in range(min(len(self.moves), max(at_least, self.ends_per_step))):
            move = self.moves.pop(self.dice.randrange(len(self.moves)))
            fails = self.dice.random() < self.failure_rate
            if isinstance(move, Store):
                if fails or BROKEN in move.content:
                    ends.failed_disk_block_ids.append(move.disk_block)
                else:
                    self.blocks[move.disk_block] = move.content
                    if move.label is not None:
                        self.labels[move.disk_block] = move.label
                    ends.stored_disk_block_ids.append(move.disk_block)
            elif fails or BROKEN in self.blocks[move.disk_block]:
                ends.failed_host_block_ids.append(move.host_block)
                self.labels.pop(move.disk_block, None)
            else:
                self._host[move.host_block] = self.blocks[move.disk_block]
                if move.disk_block in self.labels:
                    self._host_labels[move.host_block] = self.labels[move.disk_block]
                ends.loaded_host_block_ids.append(move.host_block)
        return ends

    def corrupt(self, blocks: Iterable[int]) -> None:
        """Make the loads of blocks with contents fail."""
        self.blocks.update({b: (BROKEN,) for b in blocks if b in self.blocks})
