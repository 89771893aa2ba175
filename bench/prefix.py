"""Measures the prefix cache's hits with each tier, and its cost when there are none.

    python bench/prefix.py [--quick] [--json FILE]

Conversations take turns: each prompt is the conversation so far and some new tokens. Between two
turns of a conversation others run, so that all together need more blocks than the device has. The
scheduler core and its block accounting are real. The device is a time model of a model with 8
billion parameters in 2-byte numbers, at 4.8 TB/s and 400 TFLOP/s. Copies to and from the host run
beside the step at 50 GB/s; a disk moves one block after the other, at 5 GB/s in each direction.

`hit_over_ceiling`: prompt blocks found ÷ prompt blocks that were computed before, with a host tier
that has room for all; the goal is 0.97. `loss_at_zero_hits`: the share of throughput that caching
costs if prompts share nothing; the goal is 0.005. The core's processor time is added to the
modelled time of the steps, although two steps in flight would hide it. Runs with and without
caching take turns, and the fastest of each counts. `loss_at_zero_hits_demoting`: the same share
with a host tier, to which all evicted blocks are copied.
"""

import argparse
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from harness.case import Results, Table, arguments, main
from harness.device import Clock, SimulatedWorker
from harness.turns import turns

from contract.arrays import Int32Array, ints
from contract.hashing import BlockHash, extend_chain, root_hash
from contract.step import NewSequence, Plan, Result
from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler
from sim_worker.time_model import TimeModel

BLOCK_SIZE = 16
KV_BYTES_PER_TOKEN = 131_072
BLOCK_BYTES = BLOCK_SIZE * KV_BYTES_PER_TOKEN
SWAP_BYTES_PER_S = 50e9
DISK_BYTES_PER_S = 5e9
DEVICE = TimeModel(8e9, KV_BYTES_PER_TOKEN, 4.8e12, 400e12)

BASE = SchedulerConfig(
    num_blocks=4096,
    block_size=BLOCK_SIZE,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    max_model_len=16_384,
    bytes_per_block=BLOCK_BYTES,
    swap_bytes_per_s=SWAP_BYTES_PER_S,
    disk_bytes_per_s=DISK_BYTES_PER_S,
    prefill_tokens_per_s=25_000.0,
    preemption_mode=PreemptionMode.COST,
)
TIERS = {
    "device": BASE,
    "device, host": replace(BASE, num_host_blocks=32_768),
    "device, host, disk": replace(BASE, num_host_blocks=4096, num_disk_blocks=32_768),
}
_Called = TypeVar("_Called")


@dataclass(frozen=True)
class Turn:
    """One prompt, and the answer that it gets."""

    conversation: int
    index: int
    prompt: Int32Array
    """int32[P]: the conversation so far, and the new tokens."""
    answer: Int32Array

    @property
    def key(self) -> int:
        return self.conversation * 1000 + self.index


@dataclass
class Trace:
    """Conversations, each a list of turns; the next turn comes `think_s` after an answer."""

    conversations: list[list[Turn]]
    think_s: npt.NDArray[np.float64]
    """float64[conversations, turns]."""


@dataclass
class Outcome:
    """The result of playing a trace."""

    num_blocks: int = 0
    """Full blocks of the prompts, each without its last token, which is always computed."""
    num_known: int = 0
    """Blocks whose content was computed before; they are the ceiling of hits."""
    num_found: int = 0
    end_s: float = 0.0
    """Modelled time of the whole trace."""
    device_s: float = 0.0
    """The part of `end_s` in which a step was executed."""
    core_s: float = 0.0
    """Processor time of the core, in this machine's seconds."""
    num_steps: int = 0
    ttft_s: list[float] = field(default_factory=list)


def make_trace(num_conversations: int, num_turns: int, *, is_shared: bool, seed: int = 0) -> Trace:
    """Make conversations that begin with one of four system prompts, or share nothing."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> Int32Array:
        return rng.integers(0, 32_000, rng.integers(low, high), dtype=np.int32)

    systems = [tokens(200, 600) for _ in range(4)]
    conversations = []
    for number in range(num_conversations):
        said = systems[number % 4] if is_shared else tokens(200, 600)
        each = []
        for index in range(num_turns):
            prompt = np.concatenate([said, tokens(40, 400)])
            each.append(Turn(number, index, prompt, tokens(50, 250)))
            said = np.concatenate([prompt, each[-1].answer]) if is_shared else tokens(200, 3000)
        conversations.append(each)
    return Trace(conversations, rng.exponential(5.0, (num_conversations, num_turns)))


def blocks_of(token_ids: Int32Array) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_chain(hashes, root_hash(""), token_ids, BLOCK_SIZE)
    return hashes


class ModelledDevice:
    """A simulated worker, and the times at which its steps and its disk moves end."""

    def __init__(self, turns_by_name: dict[bytes, Turn]) -> None:
        def draw(new: NewSequence, index: int) -> int:
            turn = turns_by_name[new.sampling]
            return int(turn.answer[index - len(turn.prompt)])

        self._worker = SimulatedWorker(BASE.max_num_seqs, draw)
        self._free_at_s = 0.0
        self.busy_s = 0.0
        """Time in which the device executed steps."""
        self._disk: list[tuple[float, int, str, int]] = []
        """Heap of disk moves in progress: end, a number, the outcome's field, the block."""
        self._disk_free_at_s = dict.fromkeys(("store", "load"), 0.0)
        self._num_moves = 0

    def execute(self, plan: Plan, now_s: float) -> tuple[float, Result]:
        """Return the time of the step's result, and the result."""
        begin_s = max(now_s, self._free_at_s)
        outcome = self._worker.execute(plan)
        self._begin_disk_moves(plan, begin_s)
        num_swapped = len(plan.swap_in_src_block_ids) + len(plan.swap_out_src_block_ids)
        end_s = begin_s + max(
            DEVICE.step_s(plan.num_scheduled_tokens, self._worker.num_context_tokens),
            num_swapped * BLOCK_BYTES / SWAP_BYTES_PER_S,
        )
        self.busy_s += end_s - begin_s
        if end_s == begin_s and self._disk:  # the step only waits for the disk
            end_s = max(begin_s, self._disk[0][0])
        self._free_at_s = end_s
        return end_s, replace(outcome, **self._ended_disk_moves(end_s))

    def _begin_disk_moves(self, plan: Plan, now_s: float) -> None:
        for kind, name, blocks in (
            ("store", "stored_disk_block_ids", plan.disk_store_dst_block_ids),
            ("load", "loaded_host_block_ids", plan.disk_load_dst_block_ids),
        ):
            for block in blocks.tolist():
                end_s = max(now_s, self._disk_free_at_s[kind]) + BLOCK_BYTES / DISK_BYTES_PER_S
                self._disk_free_at_s[kind] = end_s
                self._num_moves += 1
                heapq.heappush(self._disk, (end_s, self._num_moves, name, block))

    def _ended_disk_moves(self, now_s: float) -> dict[str, Int32Array]:
        ends: dict[str, list[int]] = {"stored_disk_block_ids": [], "loaded_host_block_ids": []}
        while self._disk and self._disk[0][0] <= now_s:
            _, _, name, block = heapq.heappop(self._disk)
            ends[name].append(block)
        return {name: ints(blocks) for name, blocks in ends.items()}


class _Play:
    """The conversations of a trace, on one core and one modelled device."""

    def __init__(self, trace: Trace, config: SchedulerConfig) -> None:
        self._trace = trace
        self._clock = Clock()
        self._core = Scheduler(config)
        each_turn = (turn for each in trace.conversations for turn in each)
        self._device = ModelledDevice({str(turn.key).encode(): turn for turn in each_turn})
        self._num_in_flight = 0
        self._live: dict[int, tuple[Turn, float]] = {}
        """Maps a sequence key to its turn and the time of the turn's arrival."""
        self._known: set[BlockHash] = set()
        self.outcome = Outcome()

    def run(self) -> Outcome:
        for number, each in enumerate(self._trace.conversations):
            self._come(float(self._trace.think_s[number, 0]), each[0])
        self._clock.run()
        assert not self._live, "the core has nothing to do, and not all is done"
        self.outcome.device_s, self.outcome.end_s = self._device.busy_s, self._clock.now
        return self.outcome

    def _come(self, at_s: float, turn: Turn) -> None:
        self._clock.at(at_s, lambda: self._submit(turn))

    def _submit(self, turn: Turn) -> None:
        self._live[turn.key] = turn, self._clock.now
        blocks = blocks_of(turn.prompt[:-1])
        self.outcome.num_blocks += len(blocks)
        self.outcome.num_known += sum(block in self._known for block in blocks)
        self._known.update(blocks)
        name = str(turn.key).encode()
        request = Request(SourceId(0), SeqKey(turn.key), "", turn.prompt, 1, len(turn.answer), name)
        self._timed(lambda: self._core.submit(request, self._clock.now))
        self._launch()

    def _launch(self) -> None:
        while self._num_in_flight < MAX_STEPS_IN_FLIGHT:
            plan = self._timed(lambda: self._core.schedule(self._clock.now))
            if plan is None:
                return
            self.outcome.num_steps += 1
            self._num_in_flight += 1
            end_s, result = self._device.execute(plan, self._clock.now)
            self._clock.at(end_s, lambda result=result: self._collect(result))

    def _collect(self, result: Result) -> None:
        self._num_in_flight -= 1
        news = self._timed(lambda: self._core.update(result))
        for admitted in news.admitted:
            self.outcome.num_found += admitted.num_cached_tokens // BLOCK_SIZE
            self.outcome.ttft_s.append(self._clock.now - self._live[admitted.seq_key][1])
        for finished in news.finished:
            turn, _ = self._live.pop(finished.seq_key)
            self._known.update(blocks_of(np.concatenate([turn.prompt, turn.answer[:-1]])))
            following = turn.index + 1
            if following < len(conversation := self._trace.conversations[turn.conversation]):
                think_s = float(self._trace.think_s[turn.conversation, following])
                self._come(self._clock.now + think_s, conversation[following])
        self._launch()

    def _timed(self, call: Callable[[], _Called]) -> _Called:
        """Call the core, and count its processor time."""
        started_s = time.process_time()
        result = call()
        self.outcome.core_s += time.process_time() - started_s
        return result


def losses_at_zero_hits(
    num_conversations: int, num_turns: int, num_rounds: int
) -> tuple[float, float]:
    """Return the share of throughput that caching costs if prompts have nothing in common.

    The first share is without a host tier, the second with one.
    """
    trace = make_trace(num_conversations, num_turns, is_shared=False)
    trace.think_s /= 5
    sides = {
        "off": replace(BASE, enable_prefix_caching=False),
        "on": BASE,
        "on, host": TIERS["device, host"],
    }
    least_s = dict.fromkeys(sides, float("inf"))
    table = Table("caching:<8", "blocks:,d", "steps:,d", "device s:.2f", "core s:.3f")
    for _, name in turns(sides, num_rounds):
        outcome = _Play(trace, sides[name]).run()
        assert outcome.num_found == 0
        least_s[name] = min(least_s[name], outcome.device_s + outcome.core_s)
        numbers = (outcome.num_blocks, outcome.num_steps, outcome.device_s, outcome.core_s)
        table.row(name, *numbers)
    return 1 - least_s["off"] / least_s["on"], 1 - least_s["off"] / least_s["on, host"]


def measure(given: argparse.Namespace) -> Results:
    trace = make_trace(*((80, 6) if given.quick else (160, 10)), is_shared=True)
    distinct = {
        block
        for each in trace.conversations
        for block in blocks_of(np.concatenate([each[-1].prompt, each[-1].answer]))
    }
    print(f"{len(distinct):,} distinct blocks; the device has {BASE.num_blocks:,}")
    table = Table("tiers:<20", "found:.4f", "ceiling:.4f", "ratio:.3f", "s:.1f", "s to start:.3f")
    ratios = {}
    for name, config in TIERS.items():
        outcome = _Play(trace, config).run()
        found, ceiling = (n / outcome.num_blocks for n in (outcome.num_found, outcome.num_known))
        ratios[name] = found / ceiling
        table.row(name, found, ceiling, ratios[name], outcome.end_s, np.mean(outcome.ttft_s))
    loss, loss_demoting = losses_at_zero_hits(*((24, 4, 3) if given.quick else (48, 6, 5)))
    print(f"loss at zero hits: {loss:.2%}; {loss_demoting:.2%} with a host tier")
    return {
        "hit_over_ceiling": ratios["device, host"],
        "hit_over_ceiling_device": ratios["device"],
        "hit_over_ceiling_disk": ratios["device, host, disk"],
        "loss_at_zero_hits": loss,
        "loss_at_zero_hits_demoting": loss_demoting,
    }


if __name__ == "__main__":
    main(arguments(__doc__, quick="fewer conversations; under a minute").parse_args(), measure)
