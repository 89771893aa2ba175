"""Random schedules: in any order of steps, each sequence gets its own tokens."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from fake_model import VOCAB_SIZE, FakeModel, FakePool, context_hash
from sampling_reference import reference_token

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.step.executor import Executor

LIMITS = Limits(
    max_num_seqs=5,
    max_model_len=40,
    max_num_batched_tokens=14,
    num_blocks=70,  # enough for all rows at their longest
    block_size=3,
    vocab_size=VOCAB_SIZE,
)
EOS = (13,)


@dataclass(eq=False)
class Sequence:
    prompt: list[int]
    sampling: SamplingParams
    max_total: int
    output: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def known(self):
        return self.prompt + self.output


@dataclass(eq=False)
class Held:
    """A sequence in a row by the scheduler's count, which includes tokens in flight."""

    seq: Sequence
    num_tokens: int
    num_computed: int
    blocks: list[int]

    is_prefilling: bool = True

    @property
    def decodes(self):
        return not self.is_prefilling and self.num_tokens < self.seq.max_total


def expected_output(seq):
    model, output = FakeModel(), []
    while len(seq.prompt) + len(output) < seq.max_total:
        hidden = torch.tensor([[float(context_hash(seq.prompt + output))]], dtype=torch.float64)
        logits = model.logits(hidden)[0].tolist()
        output.append(reference_token(logits, seq.sampling, seq.prompt, output, EOS))
        ends = () if seq.sampling.ignore_eos else EOS
        if output[-1] in ends + seq.sampling.stop_token_ids:
            break
    return output


def random_sequence(rng):
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
    sampling = SamplingParams(
        seed=rng.getrandbits(64),
        temperature=rng.choice([0.0, 1.0, 8.0]),
        top_k=rng.choice([0, 0, 20]),
        frequency_penalty=rng.choice([0.0, 0.0, 1.5]),
        min_tokens=rng.choice([0, 0, 4]),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 6]))),
    )
    return Sequence(prompt, sampling, len(prompt) + rng.randint(1, 20))


class Simulation:
    """A scheduler that decides at random, `depth` steps ahead of the results."""

    def __init__(self, seed, depth):
        self.rng = random.Random(seed)
        self.depth = depth
        pool = FakePool(LIMITS.num_blocks, LIMITS.block_size)
        self.executor = Executor(FakeModel(), pool, LIMITS, EOS, torch.device("cpu"))
        self.waiting = [random_sequence(self.rng) for _ in range(14)]
        self.done = []
        self.rows = {}
        self.free = list(range(LIMITS.num_blocks))
        self.step_id = 0
        self.in_flight = []

    def run(self):
        while self.waiting or self.rows:
            self.launch()
            if len(self.in_flight) >= self.depth:
                self.collect()
            assert self.step_id < 2000, "it does not come to an end"
        return self.done

    def launch(self):
        released = [row for row in self.rows if self.rows[row].seq.has_ended]
        if self.rows and self.rng.random() < 0.1:
            # Preemption needs all tokens, so nothing may be in flight.
            while self.in_flight:
                self.collect()
            released = [row for row in self.rows if self.rows[row].seq.has_ended]
            released.append(self.rng.choice(list(self.rows)))
        released = sorted(set(released))
        for row in released:
            held = self.rows.pop(row)
            self.free += held.blocks
            (self.done if held.seq.has_ended else self.waiting).append(held.seq)
        self.rng.shuffle(self.free)

        new_rows = []
        while self.waiting and len(self.rows) < LIMITS.max_num_seqs and self.rng.random() < 0.5:
            needed = -(-len(self.waiting[0].known) // LIMITS.block_size)
            new_rows.append(self.admit(self.waiting.pop(0), needed))

        appended = []
        decodes = [row for row in sorted(self.rows) if self.rows[row].decodes]
        for row in decodes:
            held = self.rows[row]
            if held.num_tokens > len(held.blocks) * LIMITS.block_size:
                held.blocks.append(self.free.pop())
                appended.append((row, held.blocks[-1]))

        budget = LIMITS.max_num_batched_tokens - len(decodes)
        chunks = []
        for row, held in self.rows.items():
            left = held.num_tokens - held.num_computed
            if held.is_prefilling and budget and self.rng.random() < 0.8:
                chunks.append((row, self.rng.randint(1, min(left, budget))))
                budget -= chunks[-1][1]
        self.advance(decodes, chunks)
        self.step_id += 1
        step = Plan(
            self.step_id,
            len(decodes),
            released_rows=np.array(released, np.int32),
            new_sequences=tuple(new_rows),
            appended_rows=np.array([row for row, _ in appended], np.int32),
            appended_block_ids=np.array([block for _, block in appended], np.int32),
            chunk_rows=np.array([row for row, _ in chunks], np.int32),
            chunk_lens=np.array([length for _, length in chunks], np.int32),
        )
        owners = {row: held.seq for row, held in self.rows.items()}
        self.in_flight.append((owners, self.executor.launch(step)))

    def admit(self, seq, num_blocks):
        row = self.rng.choice([row for row in range(LIMITS.max_num_seqs) if row not in self.rows])
        blocks = [self.free.pop() for _ in range(num_blocks)]
        self.rows[row] = Held(seq, len(seq.known), 0, blocks)
        return NewSequence(
            seq_id=row,
            row=row,
            token_ids=np.array(seq.known, np.int32),
            num_prompt_tokens=len(seq.prompt),
            num_computed_tokens=0,
            block_ids=np.array(blocks, np.int32),
            sampling=seq.sampling,
            max_total_tokens=seq.max_total,
        )

    def advance(self, decodes, chunks):
        for row, length in [(row, 1) for row in decodes] + chunks:
            held = self.rows[row]
            held.num_computed += length
            if held.num_computed == held.num_tokens:
                held.num_tokens += 1
                held.is_prefilling = False

    def collect(self):
        owners, launched = self.in_flight.pop(0)
        output = self.executor.collect(launched)
        assert output.failed_rows.tolist() == []
        stopped = output.stopped_rows.tolist()
        sampled = zip(output.sampled_rows.tolist(), output.sampled_token_ids.tolist(), strict=True)
        for row, token in sampled:
            seq = owners[row]
            assert not seq.has_ended, "a token after the end"
            seq.output.append(token)
            seq.has_ended = row in stopped or len(seq.known) == seq.max_total


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_each_sequence_its_own_tokens(seed, depth):
    finished = Simulation(seed, depth).run()
    assert len(finished) == 14
    for seq in finished:
        assert seq.output == expected_output(seq)
