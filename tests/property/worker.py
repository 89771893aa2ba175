"""A worker without a model, whose KV records the context from which it was computed.

It executes plans as worker.proto says, each part at the worst allowed moment, and fails when it
reads a wrong slot.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from zlib import crc32

import numpy as np

from contract.arrays import Int32Array, ints
from contract.hashing import HASH_BYTES, BlockHash
from contract.state import HeldBlocks, HeldRow, Holdings
from contract.step import NewSequence, Plan, Result, StepLogprob
from contract.worker_limits import STATE_WINDOW, Chunk
from scheduler_svc.core.interface.config import SchedulerConfig
from tests.property.beams import logprobs
from tests.property.disk import BROKEN, Content, FakeDisk
from tests.property.names import in_group, is_name_of
from tests.property.oracle import Context, next_token, slot_content, stops

ARRIVING: Context = ("arriving",)  # a swap-in is in progress: no one may read or write it
VOID: Context = ("void",)  # computed after a failed swap-in; the worker cannot detect it
VOID_TOKEN = 7  # sampled from VOID: must not reach a client
WRONG: Context = ("wrong guess",)  # the KV of a wrong guess
SEARCH = b"search "  # begins a beam's sampling parameters; the salt follows, as for others


@dataclass(eq=False)
class Row:
    new: NewSequence
    salt: str
    tokens: list[int]
    blocks: list[int]
    computed: int
    is_beam: bool = False  # then no token ends it, and it reports candidates
    ended: bool = False
    is_void: bool = False
    num_told: int = 0  # tokens that the scheduler knows

    def decodes(self, *, drafts: bool) -> bool:
        started = self.computed >= len(self.new.token_ids)
        if drafts:  # then a row that has decoded counts until it is released
            return started and len(self.new.token_ids) + 1 < self.new.max_total_tokens
        return started and len(self.tokens) < self.new.max_total_tokens

    def content(self, position: int, group: int = 0) -> Context:
        return slot_content(in_group(self.salt, group), self.tokens, position)


class FakeWorker:
    """The memory of every tier, and the rows."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.num_blocks = config.num_blocks
        self.slots: list[Context | None] = [None] * (config.num_blocks * config.block_size)
        self.host: dict[int, Content] = {}  # by block, if it has contents
        self.labels: dict[int, bytes] = {}
        self.host_labels: dict[int, bytes] = {}
        self.disk = FakeDisk(config.num_disk_blocks, self.host, self.host_labels)
        self.pins: dict[BlockHash, float] = {}  # as if no time passed
        self.identities: set[bytes] = set()  # of sequences that were announced, or may be announced
        self.rows: dict[int, Row] = {}
        self.failed_in = -1  # the last step in which a swap-in failed
        self.num_computed_tokens = 0
        self.touched: dict[int, set[int]] = {}  # device blocks, by step

    def execute(self, plan: Plan) -> Result:
        self._label(plan)
        self.pins.update(plan.pins)
        self._change_rows(plan)
        self.touched[plan.step_id] = {
            *(block for row in self.rows.values() for block in self._held_by(row)),
            *plan.labelled_block_ids.tolist(),
            *plan.copy_src_block_ids.tolist(),
            *plan.swap_out_src_block_ids.tolist(),
            *plan.swap_in_dst_block_ids.tolist(),
        }
        self.disk.begin(
            _pairs(plan.disk_store_src_block_ids, plan.disk_store_dst_block_ids),
            _pairs(plan.disk_load_src_block_ids, plan.disk_load_dst_block_ids),
        )
        arriving = self._swap(plan)
        self._copy(_pairs(plan.copy_src_block_ids, plan.copy_dst_block_ids))
        work = self._work(plan)
        for row, count in work.items():  # because a step stores all KV before it reads any
            self._store(row, count)
        # the scheduler did not know of the failure when it planned this
        if plan.step_id == self.failed_in + 1:
            for row, count in work.items():
                self._spread(row, count)
        for row, count in work.items():
            self._read(row, count)
        failed = self._arrive(plan, arriving)
        return self._sample(plan, work, failed)

    def resize(self, num_blocks: int) -> None:
        """Remove blocks that no row has, or add empty blocks."""
        for row in self.rows.values():
            assert max(self._held_by(row), default=0) < num_blocks, "a row has a block that goes"
        num_slots = num_blocks * self.config.block_size
        self.slots = self.slots[:num_slots] + [None] * (num_slots - len(self.slots))
        self.labels = {block: label for block, label in self.labels.items() if block < num_blocks}
        self.num_blocks = num_blocks

    def content(self, block: int) -> Content:
        """Return what a device block holds."""
        return tuple(self.slots[self._block(block)])

    def hand_over(self) -> Holdings:
        """Forget the rows, as when a scheduler attaches, and return the holdings."""
        self.disk.end(at_least=len(self.disk.moves))
        rows, self.rows = self.rows, {}
        return Holdings(
            tuple(self._held(row) for row in rows.values() if self._is_held(row)),
            _held_blocks(self.labels),
            _held_blocks(self.host_labels),
            _held_blocks(self.disk.labels),
            tuple(self.pins.items()),
        )

    def _is_held(self, row: Row) -> bool:
        slots = [slot for _, _, slot in self._seen(row, 0)]
        return bool(row.new.identity) and not any(self.slots[slot] == BROKEN for slot in slots)

    def _held(self, row: Row) -> HeldRow:
        luck = crc32(row.new.identity)
        return HeldRow(
            identity=row.new.identity,
            token_ids=np.array(row.tokens, np.int32),
            num_computed_tokens=min(row.computed, len(row.tokens) - 1),
            block_ids=ints(row.blocks),
            has_stopped=row.ended,
            had_logprobs=luck % 4 == 0,  # an arbitrary choice
            logprobs=tuple(map(log_of, range(len(row.tokens))[len(row.tokens) - luck // 4 % 4 :])),
            search=row.new.search,
        )

    def corrupt_host(self, blocks: Iterable[int]) -> None:
        """Make the swap-ins and stores of blocks with contents fail."""
        broken = (BROKEN,) * self.config.block_size
        self.host.update({block: broken for block in blocks if block in self.host})

    # --- rows -----------------------------------------------------------------------------------

    def _change_rows(self, plan: Plan) -> None:
        for r in plan.released_rows.tolist():
            del self.rows[r]
        void = [r for r, row in self.rows.items() if row.is_void]
        assert not void, "computed from a failed swap-in, reported, and still running"
        for new in plan.new_sequences:
            assert new.row not in self.rows, "a new sequence gets a row in use"
            assert 0 <= new.row < self.config.max_num_seqs
            tokens, blocks = new.token_ids.tolist(), new.block_ids.tolist()
            assert len(blocks) // self.num_groups * self.config.block_size >= len(tokens)
            assert new.num_computed_tokens < len(tokens)
            salt = new.sampling.removeprefix(SEARCH).decode()  # the tests copy it there
            is_beam = new.sampling.startswith(SEARCH)
            row = Row(new, salt, tokens, blocks, new.num_computed_tokens, is_beam)
            row.num_told = len(tokens)
            self.identities.add(new.identity)
            self.rows[new.row] = row
        for r, block in _pairs(plan.appended_rows.repeat(self.num_groups), plan.appended_block_ids):
            self.rows[r].blocks.append(block)
        for r, place, block in plan.placements.reshape(-1, 3).tolist():
            assert self.config.kv_windows[place % self.num_groups] is not None
            self.rows[r].blocks[place] = block
        self._rename(_pairs(plan.renamed_src_block_ids, plan.renamed_dst_block_ids))

    def _rename(self, pairs: list[tuple[int, int]]) -> None:
        """Rename moved blocks in every table; their new numbers must be unused."""
        src_to_dst = dict(pairs)
        assert len(src_to_dst) == len(pairs), "a block is renamed twice"
        for row in self.rows.values():
            held = self._held_by(row)
            taken = [b for b in held if b in src_to_dst.values() and b not in src_to_dst]
            assert not taken, "a block is renamed to one that a table names"
            row.blocks = [src_to_dst.get(block, block) for block in row.blocks]
            assert all(0 <= block < self.num_blocks for block in self._held_by(row))

    def _work(self, plan: Plan) -> dict[Row, int]:
        """Return how many tokens each row computes."""
        drafts = self.config.num_draft_tokens > 0
        decoding = {r: 1 for r, row in self.rows.items() if row.decodes(drafts=drafts)}
        assert len(decoding) == plan.num_decodes, "scheduler and worker count decodes differently"
        chunks = dict(zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True))
        assert len(chunks) == len(plan.chunk_rows), "a row is named twice"
        assert not decoding.keys() & chunks.keys()
        num_scheduled = len(decoding) + sum(chunks.values())
        assert plan.num_scheduled_tokens == num_scheduled <= self.config.max_num_batched_tokens
        decoding = {r: 1 + self._guess(self.rows[r]) for r in decoding if not self.rows[r].ended}
        return {self.rows[r]: count for r, count in (decoding | chunks).items()}

    def _guess(self, row: Row) -> int:
        """Guess next tokens, as far as there is room; return how many are right and now known.

        Wrong guesses leave WRONG in their slots.
        """
        num_left = row.new.max_total_tokens - 1 - len(row.tokens)
        num_slots = len(row.blocks) // self.num_groups * self.config.block_size
        num_guesses = min(self.config.num_draft_tokens, num_left, num_slots - len(row.tokens))
        assert num_guesses >= 0, "a row has no room for one token"
        luck = crc32(repr(row.content(row.computed)).encode()) // 4
        num_right = min(num_guesses, luck % (self.config.num_draft_tokens + 1))
        start = len(row.tokens)
        for group in range(self.num_groups):
            for slot in self._slots(row, start, start + num_guesses, group):
                self.slots[slot] = WRONG
                self.labels.pop(slot // self.config.block_size, None)
        for done in range(num_right):
            row.tokens.append(next_token(row.new.output_index, row.content(len(row.tokens) - 1)))
            if stops(row.content(len(row.tokens) - 1)):
                row.ended = True
                return done + 1
        return num_right

    # --- labels ---------------------------------------------------------------------------------

    def _label(self, plan: Plan) -> None:
        for block, label in zip(plan.labelled_block_ids.tolist(), plan.labels, strict=True):
            if BROKEN not in self.slots[self._block(block)]:
                self.labels[block] = label.tobytes()
                content = self.content(block)
                assert self.is_named(label.tobytes(), content), f"block {block} holds {content}"

    def is_named(self, name: bytes, content: Content) -> bool:
        """Whether a hash is right for a content; without a prefix cache, for one sequence's
        content."""
        if self.config.enable_prefix_caching:
            return is_name_of(name, content)
        return any(is_name_of(name, content, root) for root in self.identities)

    # --- blocks ---------------------------------------------------------------------------------

    def _block(self, block: int) -> slice:
        assert 0 <= block < self.num_blocks
        size = self.config.block_size
        return slice(block * size, (block + 1) * size)

    def _swap(self, plan: Plan) -> dict[int, Content]:
        """Swap out; return the contents that arrive in device blocks when the step is done."""
        outs = _pairs(plan.swap_out_src_block_ids, plan.swap_out_dst_block_ids)
        ins = _pairs(plan.swap_in_src_block_ids, plan.swap_in_dst_block_ids)
        assert not (outs and ins), "a step swaps out and in"
        for source, target in outs:
            assert 0 <= target < self.config.num_host_blocks
            assert target not in self.disk.loading, "a swap-out writes a host block being loaded"
            self.host[target] = self.content(source)
            _copy_label(self.labels.get(source), self.host_labels, target)
        for source, _ in ins:
            assert source in self.host, "a swap-in reads a host block that holds nothing"
        arriving = {target: self.host[source] for source, target in ins}
        for source, block in ins:
            _copy_label(self.host_labels.get(source), self.labels, block)
        for block in arriving:
            self.slots[self._block(block)] = [ARRIVING] * self.config.block_size
        return arriving

    def _arrive(self, plan: Plan, arriving: Mapping[int, Content]) -> list[int]:
        """Complete the swap-ins; return those that failed."""
        for block, content in arriving.items():
            there = {*self.slots[self._block(block)]}
            assert there == {ARRIVING}, "a block is written while it is swapped in"
            self.slots[self._block(block)] = content
        failed = [block for block, content in arriving.items() if BROKEN in content]
        for source, block in _pairs(plan.swap_in_src_block_ids, plan.swap_in_dst_block_ids):
            if block in failed:
                self.labels.pop(block, None)
                self.host_labels.pop(source, None)
        self.failed_in = plan.step_id if failed else self.failed_in
        return failed

    def _copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        read = [
            (target, self.slots[self._block(source)], self.labels.get(source))
            for source, target in pairs
        ]
        for target, content, label in read:
            _copy_label(label, self.labels, target)
            assert ARRIVING not in content, "a copy reads a block that is being swapped in"
            self.slots[self._block(target)] = content

    # --- computation ----------------------------------------------------------------------------

    @property
    def num_groups(self) -> int:
        return len(self.config.kv_windows)

    def _first_seen(self, position: int, group: int) -> int:
        """Return the first position that the token at `position` sees."""
        window = self.config.kv_windows[group]
        if isinstance(window, Chunk):
            return position - position % window.num_tokens
        return 0 if window is None else max(0, position - window + 1)

    def _held_by(self, row: Row) -> list[int]:
        """Return the blocks of a table that tokens to be computed see, or are written to."""
        return [
            block
            for place, block in enumerate(row.blocks)
            if (place // self.num_groups + 1) * self.config.block_size
            > self._first_seen(row.computed, place % self.num_groups)
        ]

    def _slots(self, row: Row, start: int, end: int, group: int = 0) -> list[int]:
        size, num = self.config.block_size, self.num_groups
        places = [divmod(position, size) for position in range(start, end)]
        return [row.blocks[index * num + group] * size + offset for index, offset in places]

    def _seen(self, row: Row, count: int) -> Iterable[tuple[int, int, int]]:
        """Yield group, position and slot of all KV that the last `count` tokens see."""
        for group in range(self.num_groups):
            first = self._first_seen(row.computed - count, group)
            for position, slot in enumerate(self._slots(row, first, row.computed, group), first):
                yield group, position, slot

    def _store(self, row: Row, count: int) -> None:
        assert row.computed + count <= len(row.tokens)
        for group, window in enumerate(self.config.kv_windows):
            slots = self._slots(row, row.computed, row.computed + count, group)
            if window == STATE_WINDOW:
                self._advance(row, slots[-1], group)
            for position, slot in enumerate(slots, row.computed):
                is_null = slot < self.config.block_size and self.config.has_windows
                assert not is_null, f"the null block is written, window {window}"
                self.slots[slot] = row.content(position, group)
                self.labels.pop(slot // self.config.block_size, None)
        row.computed += count

    def _advance(self, row: Row, last: int, group: int) -> None:
        """Check that a state comes from the tokens before this position, and from no later ones."""
        size = self.config.block_size
        if row.computed:
            (slot,) = self._slots(row, row.computed - 1, row.computed, group)
            later = self.slots[slot + 1 : (slot // size + 1) * size]
            assert {*later} <= {None, VOID, BROKEN}, f"a state is ahead of {row.computed} tokens"
        for slot in range(last + 1, (last // size + 1) * size):
            self.slots[slot] = None

    def _spread(self, row: Row, count: int) -> None:
        """Mark KV as VOID if it is computed from a failed swap-in."""
        if any(self.slots[slot] in (BROKEN, VOID) for _, _, slot in self._seen(row, count)):
            row.is_void = True
            for group in range(self.num_groups):
                for slot in self._slots(row, row.computed - count, row.computed, group):
                    self.slots[slot] = VOID

    def _read(self, row: Row, count: int) -> None:
        self.num_computed_tokens += count
        for group, position, slot in self._seen(row, count):
            is_right = row.is_void or self.slots[slot] == row.content(position, group)
            assert is_right, f"wrong KV at position {position}: {self.slots[slot]}"

    def _sample(self, plan: Plan, work: Mapping[Row, int], failed: list[int]) -> Result:
        sampled, tokens, stopped, beams = [], [], [], []
        for row in work:
            if row.computed == len(row.tokens) and not row.ended:
                last = row.content(row.computed - 1)
                row.tokens.append(next_token(row.new.output_index, last))
                if row.is_beam:
                    void = [(VOID_TOKEN, np.float32(0))] * 2
                    beams.append((row.new.row, void if row.is_void else logprobs(last)))
                row.ended = not row.is_beam and stops(row.content(row.computed))
            told = row.tokens[row.num_told :]
            sampled += [row.new.row] * len(told)
            tokens += [VOID_TOKEN] * len(told) if row.is_void else told
            if row.ended:
                stopped.append(row.new.row)
            elif self.config.num_draft_tokens:
                row.ended = len(row.tokens) == row.new.max_total_tokens
            row.num_told = len(row.tokens)
        must_report = plan.num_scheduled_tokens == 0  # an empty step may wait for the disk
        ends = self.disk.end(at_least=int(must_report))
        return Result(
            step_id=plan.step_id,
            sampled_rows=ints(sampled),
            sampled_token_ids=ints(tokens),
            stopped_rows=ints(stopped),
            failed_rows=ints([]),
            failed_swap_in_block_ids=ints(failed),
            candidate_rows=ints([row for row, _ in beams]),
            candidate_counts=ints([len(pairs) for _, pairs in beams]),
            candidate_token_ids=ints([token for _, pairs in beams for token, _ in pairs]),
            candidate_logprobs=np.array([p for _, pairs in beams for _, p in pairs], np.float32),
            **{name: ints(blocks) for name, blocks in asdict(ends).items()},
        )


@cache
def log_of(position: int) -> StepLogprob:
    """Return a fake log-probability for the token at a position."""
    return StepLogprob(0, -float(position), ints([]), np.empty(0, np.float32))


def _copy_label(label: bytes | None, labels: dict[int, bytes], target: int) -> None:
    labels.pop(target, None)
    if label is not None:
        labels[target] = label


def _held_blocks(labels: dict[int, bytes]) -> HeldBlocks:
    packed = np.frombuffer(b"".join(labels.values()), np.uint8)
    return HeldBlocks(ints([*labels]), packed.reshape(-1, HASH_BYTES))


def _pairs(sources: Int32Array, targets: Int32Array) -> list[tuple[int, int]]:
    """Return moves; each target must occur once."""
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
    assert len({target for _, target in pairs}) == len(pairs), "a target is named twice"
    return pairs
