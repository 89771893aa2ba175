"""Which decodes share a prefix, by their block tables."""

import numpy as np
import pytest
import torch
from fake_graphs import FakeGraphs

from contract.arrays import ints
from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.registry import open_model
from gpu_worker.step import shared_prefixes
from gpu_worker.step.executor import Executor
from gpu_worker.step.shared_prefixes import find_shared
from kernels import ops
from kernels.sequences import MAX_SHARED
from tests.models_fixture import make_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 8)


def find(tables, seq_lens):
    """Groups as (sequences, tokens), with blocks of 4 tokens; checks the rest."""
    tables, seq_lens = np.array(tables, np.int32), np.array(seq_lens, np.int32)
    seqs, starts, lens, len_of_seq = find_shared(tables, seq_lens, 4)
    assert {each.dtype for each in (seqs, starts, lens, len_of_seq)} == {np.dtype(np.int32)}
    assert len(seqs) == len(len_of_seq) == len(tables)
    assert len(starts) == len(lens) + 1 == MAX_SHARED + 1
    groups = []
    of_seq = np.zeros(len(tables), int)
    for group, num_tokens in enumerate(lens):
        members = seqs[starts[group] : starts[group + 1]]
        of_seq[members] = num_tokens
        if num_tokens:
            groups.append((members.tolist(), int(num_tokens)))
        else:
            assert len(members) == 0
    assert of_seq.tolist() == len_of_seq.tolist()
    return groups


def test_a_group_shares_what_all_have_in_common():
    tables = [[1, 2, 3, 9], [5, 6, 7, 8], [1, 2, 3, 4], [1, 2, 4, 4]]
    assert find(tables, [16, 16, 16, 16]) == [([0, 2, 3], 8)]
    assert find(tables[:3], [16, 16, 16]) == [([0, 2], 12)]


def test_the_newest_token_is_a_sequence_s_own():
    tables = [[1, 2, 3], [1, 2, 3]]
    assert find(tables, [12, 12]) == [([0, 1], 8)]
    assert find(tables, [9, 12]) == [([0, 1], 8)]
    assert find(tables, [8, 12]) == []  # two blocks would leave the first nothing
    assert find(tables, [0, 12]) == []  # padding


def test_what_is_beyond_a_sequence_counts_for_nothing():
    assert find([[1, 2, 3, 4], [1, 2, 3, 4]], [10, 16]) == [([0, 1], 8)]


def test_an_equal_block_behind_different_ones_is_no_shared_beginning():
    assert find([[1, 2, 3], [7, 2, 3]], [12, 12]) == []


def test_a_short_beginning_is_not_worth_it():
    assert find([[1, 2], [1, 3]], [8, 8]) == []
    assert find([[1], [1]], [4, 4]) == []


def test_of_too_many_groups_those_that_save_most_count():
    tables = [[10 * group, 10 * group + 1, seq] for group in range(9) for seq in range(2)]
    tables[-1:] = [[80, 81, 7], [80, 81, 9]]  # one more of the last group
    groups = find(tables, [12] * len(tables))
    assert len(groups) == MAX_SHARED
    assert groups[0] == ([16, 17, 18], 8)


class Watched:
    """Our attention; keeps what the decodes of each launch share."""

    prepare_prefill = staticmethod(ops.prepare_prefill)

    def __init__(self):
        self.lens_of_seqs = []

    def prepare_decode(self, *args, **options):
        attend = ops.prepare_decode(*args, **options)

        def watched(sequences):
            if sequences.shared is not None:  # it is in what graphs replay
                self.lens_of_seqs.append(sequences.shared.len_of_seq.tolist())
            attend(sequences)

        return watched


def test_replayed_decodes_say_what_they_share(tmp_path):
    source = open_model(make_model(tmp_path / "model", "gpt_neox"))
    model, config = source.load(torch.float32, CPU, lambda _: None), source.config
    limits = Limits(
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=64,
        num_blocks=64,
        block_size=4,
        vocab_size=config.vocab_size,
    )
    watched = Watched()
    pool = KvPool(config, 64, 4, torch.float32, CPU, attention=watched)
    executor = Executor(model, pool, limits, (), CPU)
    executor.capture_decodes(FakeGraphs(), lambda _: None, shares_prefixes=True)
    prompt = np.arange(5, 19, dtype=np.int32)
    new = [
        NewSequence(
            seq_id=row,
            row=row,
            token_ids=prompt[: len(prompt) - row],
            num_prompt_tokens=len(prompt) - row,
            num_computed_tokens=0 if row == 0 else 12,
            block_ids=ints([0, 1, 2, *range(3 + 10 * row, 10 + 10 * row)]),
            sampling=SamplingParams(seed=0, temperature=0),
            max_total_tokens=40,
        )
        for row in range(2)
    ]
    executor.step(
        Plan(1, 0, new_sequences=tuple(new[:1]), chunk_rows=ints([0]), chunk_lens=ints([14]))
    )
    watched.lens_of_seqs.clear()
    executor.step(Plan(2, 1))
    assert all(lens == [0] for lens in watched.lens_of_seqs), "one alone shares nothing"
    executor.step(
        Plan(3, 1, new_sequences=tuple(new[1:]), chunk_rows=ints([1]), chunk_lens=ints([1]))
    )
    watched.lens_of_seqs.clear()
    executor.step(Plan(4, 2))
    assert len(watched.lens_of_seqs) == config.num_layers
    assert all(lens == [12, 12] for lens in watched.lens_of_seqs)
