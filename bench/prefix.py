"""What the prefix cache finds, tier by tier, and what it costs where there is nothing to find.

Conversations take turns: each prompt is all that was said before and some new tokens, and other
conversations come in between, so that all of them together need more blocks than the device has.
The scheduler core and its block accounting are the real ones. The device is a time model: an
8-billion-parameter model in 2-byte numbers on 4.8 TB/s and 400 TFLOP/s, host copies at 50 GB/s
beside the step, a disk of 5 GB/s in each direction that does one block after the other.

`hit_over_ceiling`: prompt blocks found over those that were ever computed before, with a host tier
that has room for all; the goal is 0.97. `loss_at_zero_hits`: prompts that share nothing, caching on
against off; the goal is 0.005. The core's CPU time counts in full beside the modelled time of the
steps, though two steps in flight would hide it; the sides are run in turn, and the least of each
counts. `loss_at_zero_hits_demoting`: with a host tier, to which all that is evicted is copied.

    python bench/prefix.py [--quick] [--json FILE]
"""

import argparse
import heapq
import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array, ints
from contract.hashing import BlockHash, extend_chain, root_hash
from contract.step import Plan, Result
from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.request import Request, SeqKey, SourceId
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


@dataclass(frozen=True)
class Turn:
    """One prompt, and the answer that it gets."""

    conversation: int
    index: int
    prompt: Int32Array
    """int32[P]: all that was said before, and what is new."""
    answer: Int32Array


@dataclass
class Trace:
    """Conversations, each a list of turns; the next turn comes `think_s` after an answer."""

    conversations: list[list[Turn]]
    think_s: npt.NDArray[np.float64]
    """float64[conversations, turns]."""


@dataclass
class Outcome:
    """What came of a trace."""

    num_blocks: int = 0
    """Full blocks of prompts, of which the last token must be computed."""
    num_known: int = 0
    """Those whose content was computed before: the ceiling."""
    num_found: int = 0
    now_s: float = 0.0
    """Modelled time."""
    device_s: float = 0.0
    """The part of it in which a step was executed."""
    core_s: float = 0.0
    """CPU time of the core, in this machine's seconds."""
    num_steps: int = 0
    ttft_s: list[float] = field(default_factory=list)


def make_trace(num_conversations: int, num_turns: int, *, is_shared: bool, seed: int = 0) -> Trace:
    """Make conversations that begin with one of four system prompts, or share nothing at all."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> Int32Array:
        return rng.integers(0, 32_000, rng.integers(low, high), dtype=np.int32)

    systems = [tokens(200, 600) for _ in range(4)]
    conversations = []
    for number in range(num_conversations):
        said = systems[number % 4] if is_shared else tokens(200, 600)
        turns = []
        for index in range(num_turns):
            prompt = np.concatenate([said, tokens(40, 400)])
            turns.append(Turn(number, index, prompt, tokens(50, 250)))
            said = np.concatenate([prompt, turns[-1].answer]) if is_shared else tokens(200, 3000)
        conversations.append(turns)
    return Trace(conversations, rng.exponential(5.0, (num_conversations, num_turns)))


class ModelledWorker:
    """Answers plans as a worker would, and says when."""

    def __init__(self, turns: dict[bytes, Turn]) -> None:
        self._turns = turns
        self._rows: dict[int, list[int]] = {}
        """Row: known tokens left to compute, length, length at the end."""
        self._of: dict[int, Turn] = {}
        self._free_at_s = 0.0
        self.device_s = 0.0
        """Time in which it was executing."""
        self._disk: list[tuple[float, int, str, int]] = []
        """Ends of disk moves: when, a number, the outcome's field, the block."""
        self._disk_free_at_s = dict.fromkeys(("store", "load"), 0.0)
        self._num_moves = 0

    def execute(self, plan: Plan, now_s: float) -> tuple[float, Result]:
        """Return when the step's result is there, and the result."""
        begin_s = max(now_s, self._free_at_s)
        for row in plan.released_rows.tolist():
            del self._rows[row]
        for new in plan.new_sequences:
            num_left = len(new.token_ids) - new.num_computed_tokens
            self._rows[new.row] = [num_left, len(new.token_ids), new.max_total_tokens]
            self._of[new.row] = self._turns[new.sampling]
        sampled = [row for row, (left, size, end) in self._rows.items() if not left and size < end]
        assert len(sampled) == plan.num_decodes
        for row, length in zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True):
            self._rows[row][0] -= length
            sampled += [row] * (not self._rows[row][0])
        token_ids = []
        for row in sampled:
            turn, (_, size, _) = self._of[row], self._rows[row]
            token_ids.append(int(turn.answer[size - len(turn.prompt)]))
            self._rows[row][1] += 1
        self._begin_disk_moves(plan, begin_s)
        num_context = sum(self._rows[row][1] for row in sampled)
        num_swapped = len(plan.swap_in_src_block_ids) + len(plan.swap_out_src_block_ids)
        end_s = begin_s + max(
            DEVICE.step_s(plan.num_scheduled_tokens, num_context),
            num_swapped * BLOCK_BYTES / SWAP_BYTES_PER_S,
        )
        self.device_s += end_s - begin_s
        if end_s == begin_s and self._disk:
            end_s = max(begin_s, self._disk[0][0])
        self._free_at_s = end_s
        return end_s, Result(
            plan.step_id, ints(sampled), ints(token_ids), ints([]), ints([]), **self._ends(end_s)
        )

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

    def _ends(self, now_s: float) -> dict[str, Int32Array]:
        ends: dict[str, list[int]] = {"stored_disk_block_ids": [], "loaded_host_block_ids": []}
        while self._disk and self._disk[0][0] <= now_s:
            _, _, name, block = heapq.heappop(self._disk)
            ends[name].append(block)
        return {name: ints(blocks) for name, blocks in ends.items()}


def play(trace: Trace, config: SchedulerConfig) -> Outcome:
    """Hold the conversations on one core and one modelled worker."""
    outcome = Outcome()
    turns = {_name(turn): turn for turns in trace.conversations for turn in turns}
    core, worker = Scheduler(config), ModelledWorker(turns)
    arrivals = [(float(trace.think_s[n, 0]), n, 0) for n in range(len(trace.conversations))]
    heapq.heapify(arrivals)
    live: dict[int, tuple[Turn, float]] = {}  # by sequence key, with the time of arrival
    in_flight: deque[tuple[float, Result]] = deque()
    known: set[BlockHash] = set()
    while arrivals or live:
        while arrivals and arrivals[0][0] <= outcome.now_s:
            arrived_s, number, index = heapq.heappop(arrivals)
            turn = trace.conversations[number][index]
            key = number * 1000 + index
            request = Request(
                SourceId(0), SeqKey(key), "", turn.prompt, 1, len(turn.answer), _name(turn)
            )
            live[key] = turn, arrived_s
            blocks = list(_blocks(turn.prompt[:-1]))
            outcome.num_blocks += len(blocks)
            outcome.num_known += sum(block in known for block in blocks)
            known.update(blocks)
            started_s = time.process_time()
            core.submit(request, outcome.now_s)
            outcome.core_s += time.process_time() - started_s
        while len(in_flight) < MAX_STEPS_IN_FLIGHT:
            started_s = time.process_time()
            plan = core.schedule(outcome.now_s)
            outcome.core_s += time.process_time() - started_s
            if plan is None:
                break
            outcome.num_steps += 1
            in_flight.append(worker.execute(plan, outcome.now_s))
        if not in_flight:
            assert arrivals, "the core has nothing to do, and not all is done"
            outcome.now_s = max(outcome.now_s, arrivals[0][0])
            continue
        outcome.now_s, result = in_flight.popleft()
        started_s = time.process_time()
        news = core.update(result)
        outcome.core_s += time.process_time() - started_s
        for admitted in news.admitted:
            outcome.num_found += admitted.num_cached_tokens // BLOCK_SIZE
            outcome.ttft_s.append(outcome.now_s - live[admitted.seq_key][1])
        for finished in news.finished:
            turn, _ = live.pop(finished.seq_key)
            known.update(_blocks(np.concatenate([turn.prompt, turn.answer[:-1]])))
            following = turn.index + 1
            if following < len(trace.conversations[turn.conversation]):
                think_s = float(trace.think_s[turn.conversation, following])
                heapq.heappush(arrivals, (outcome.now_s + think_s, turn.conversation, following))
    outcome.device_s = worker.device_s
    return outcome


def _name(turn: Turn) -> bytes:
    return f"{turn.conversation} {turn.index}".encode()


def _blocks(token_ids: Int32Array) -> Iterator[BlockHash]:
    hashes: list[BlockHash] = []
    extend_chain(hashes, root_hash(""), token_ids, BLOCK_SIZE)
    yield from hashes


def losses_at_zero_hits(
    num_conversations: int, num_turns: int, num_rounds: int
) -> tuple[float, float]:
    """Return the share of throughput that caching costs prompts that have nothing in common.

    Without a host tier, and with one.
    """
    trace = make_trace(num_conversations, num_turns, is_shared=False)
    trace.think_s /= 5
    sides = {
        "off": replace(BASE, enable_prefix_caching=False),
        "on": BASE,
        "on, host": TIERS["device, host"],
    }
    totals_s = dict.fromkeys(sides, float("inf"))
    for _ in range(num_rounds):
        for name, config in sides.items():
            outcome = play(trace, config)
            assert outcome.num_found == 0
            totals_s[name] = min(totals_s[name], outcome.device_s + outcome.core_s)
            print(
                f"caching {name:8}: {outcome.num_blocks:,} blocks, {outcome.num_steps:,} steps:"
                f" device {outcome.device_s:.2f} s, core {outcome.core_s:.3f} s"
            )
    return 1 - totals_s["off"] / totals_s["on"], 1 - totals_s["off"] / totals_s["on, host"]


def main() -> None:
    """Measure, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer conversations; under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()

    trace = make_trace(*((80, 6) if args.quick else (160, 10)), is_shared=True)
    distinct = {
        block
        for turns in trace.conversations
        for block in _blocks(np.concatenate([turns[-1].prompt, turns[-1].answer]))
    }
    print(f"{len(distinct):,} distinct blocks; the device has {BASE.num_blocks:,}")
    print(f"{'tiers':20} {'found':>8} {'ceiling':>8} {'ratio':>6} {'s':>8} {'s to start':>11}")
    ratios = {}
    for name, config in TIERS.items():
        outcome = play(trace, config)
        found, ceiling = outcome.num_found, outcome.num_known
        ratios[name] = found / ceiling
        print(
            f"{name:20} {found / outcome.num_blocks:8.4f} {ceiling / outcome.num_blocks:8.4f}"
            f" {ratios[name]:6.3f} {outcome.now_s:8.1f} {np.mean(outcome.ttft_s):11.3f}"
        )
    loss, loss_demoting = losses_at_zero_hits(*((24, 4, 3) if args.quick else (48, 6, 5)))
    print(f"loss at zero hits: {loss:.2%}; {loss_demoting:.2%} with a host tier")
    results = {
        "hit_over_ceiling": ratios["device, host"],
        "hit_over_ceiling_device": ratios["device"],
        "hit_over_ceiling_disk": ratios["device, host, disk"],
        "loss_at_zero_hits": loss,
        "loss_at_zero_hits_demoting": loss_demoting,
    }
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
