"""Moves between device and host: bit for bit, in long runs, in the contract's order."""

import numpy as np
import pytest
import torch
from fake_model import VOCAB_SIZE, FakeModel, FakePool, continue_greedily

from contract.codec.packing import pack_int32
from contract.errors import InvalidArgumentError
from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.kv import host_pool
from gpu_worker.kv.codecs.names import parse_codec
from gpu_worker.kv.codecs.quantized import QuantizedCodec
from gpu_worker.kv.host_pool import HostPool, runs
from gpu_worker.service.step_wire import plan_of
from gpu_worker.step.executor import Executor
from quire.v1 import worker_pb2

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=64,
    max_num_batched_tokens=40,
    num_blocks=8,
    block_size=4,
    vocab_size=VOCAB_SIZE,
    num_host_blocks=6,
)


def ints(*values):
    return np.array(values, np.int32)


def random_blocks(num_blocks=8, block_bytes=1000):
    generator = torch.Generator().manual_seed(0)
    shape = (num_blocks, block_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def test_blocks_come_back_bit_for_bit():
    device = random_blocks()
    before = device.clone()
    pool = HostPool(device, 6)
    pool.swap_out(ints(7, 0, 3, 4), ints(1, 5, 2, 3))
    device.zero_()
    pool.begin_step()
    assert not pool.swap_in(ints(5, 3, 2, 1), ints(6, 1, 0, 2)).size
    assert torch.equal(device[[6, 1, 0, 2]], before[[0, 4, 3, 7]])
    assert not device[[3, 4, 5, 7]].any()


def test_not_a_number_and_negative_zero_survive():
    values = torch.tensor([[float("nan"), -0.0, 1e-45, float("-inf")]], dtype=torch.float32)
    values.view(torch.int32)[0, 0] |= 0x1234  # the payload of a NaN
    before = values.view(torch.int32).clone()
    pool = HostPool(values.view(torch.uint8), 1)
    pool.swap_out(ints(0), ints(0))
    values.zero_()
    pool.swap_in(ints(0), ints(0))
    assert torch.equal(values.view(torch.int32), before)


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ([], [], []),
        ([3], [5], [(3, 5, 1)]),
        ([2, 3, 4, 5], [7, 8, 9, 10], [(2, 7, 4)]),
        ([5, 4, 3, 2], [10, 9, 8, 7], [(2, 7, 4)]),
        ([1, 2, 4, 5], [0, 1, 2, 3], [(1, 0, 2), (4, 2, 2)]),
        ([0, 1, 2, 3], [4, 5, 0, 1], [(0, 4, 2), (2, 0, 2)]),
        ([0, 1, 2], [2, 1, 0], [(0, 2, 1), (1, 1, 1), (2, 0, 1)]),
        ([6, 6, 7], [0, 3, 1], [(6, 0, 1), (6, 3, 1), (7, 1, 1)]),
    ],
)
def test_consecutive_pairs_are_one_run(src, dst, expected):
    assert list(runs(ints(*src), ints(*dst))) == expected


def test_a_changed_block_fails_and_leaves_the_device_alone():
    device = random_blocks()
    pool = HostPool(device, 6, has_checksums=True)
    pool.swap_out(ints(0, 1, 2), ints(0, 1, 2))
    pool._host_blocks[1, 999] ^= 1
    before = device.clone()
    assert pool.swap_in(ints(0, 1, 2), ints(4, 5, 6)).tolist() == [5]
    assert torch.equal(device[[4, 6]], before[[0, 2]])
    assert torch.equal(device[5], before[5])


def test_a_block_that_was_never_swapped_out_fails():
    pool = HostPool(random_blocks(), 6, has_checksums=True)
    assert pool.swap_in(ints(3), ints(0)).tolist() == [0]


def test_a_block_that_somebody_else_wrote_is_accepted():
    device = random_blocks()
    pool = HostPool(device, 6, has_checksums=True)
    pool.blocks[3] = device[5]
    pool.accept(ints(3))
    assert not pool.swap_in(ints(3), ints(0)).size
    assert torch.equal(device[0], device[5])


@pytest.mark.parametrize("has_checksums", [False, True])
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_quantized_host_takes_about_half_and_gives_back_nearly_the_same(
    codec, has_checksums, monkeypatch
):
    monkeypatch.setitem(host_pool._CODED_BYTES, "cpu", 5000)  # two blocks at once
    numbers = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = numbers.clone()
    quantized = QuantizedCodec(parse_codec(codec), 2048, 64, torch.bfloat16)
    pool = HostPool(numbers.view(torch.uint8), 6, codec=quantized, has_checksums=has_checksums)
    assert pool.blocks.shape == (6, 1024 + 2 * 16)
    pool.swap_out(ints(7, 0, 3, 4, 5), ints(1, 5, 2, 3, 0))
    numbers.zero_()
    assert not pool.swap_in(ints(5, 3, 2, 1, 0), ints(6, 1, 0, 2, 7)).size
    expected = quantized.decode(quantized.encode(before.view(torch.uint8))).view(torch.bfloat16)
    assert torch.equal(numbers[[6, 1, 0, 2, 7]], expected[[0, 4, 3, 7, 5]])
    assert (numbers[6] - before[0]).abs().max() < 0.2
    assert not numbers[[3, 4, 5]].any()


class TestExecutor:
    """Sequences whose next token is a hash of the context in the pool."""

    PROMPT = (11, 22, 33, 44, 55, 66)

    @pytest.fixture
    def executor(self):
        pool = FakePool(LIMITS.num_blocks, LIMITS.block_size)
        host = HostPool(pool.slots.view(LIMITS.num_blocks, -1).view(torch.uint8), 6)
        return Executor(FakeModel(), pool, LIMITS, (), torch.device("cpu"), host_pool=host)

    @staticmethod
    def row(row, tokens, blocks, num_computed=0):
        return NewSequence(
            seq_id=row,
            row=row,
            token_ids=ints(*tokens),
            num_prompt_tokens=1,
            num_computed_tokens=num_computed,
            block_ids=ints(*blocks),
            sampling=SamplingParams(seed=0, temperature=0),
            max_total_tokens=64,
        )

    def test_a_sequence_with_a_partial_tail_goes_on_after_a_swap(self, executor):
        first = executor.step(
            Plan(
                1,
                0,
                new_sequences=(self.row(0, self.PROMPT, [3, 1]),),
                chunk_rows=ints(0),
                chunk_lens=ints(6),
            )
        )
        (token,) = first.sampled_token_ids.tolist()
        # Another sequence gets its blocks in the same step that swaps them out.
        executor.step(
            Plan(
                2,
                0,
                released_rows=ints(0),
                new_sequences=(self.row(1, [9] * 8, [1, 3]),),
                swap_out_src_block_ids=ints(3, 1),
                swap_out_dst_block_ids=ints(0, 1),
                chunk_rows=ints(1),
                chunk_lens=ints(8),
            )
        )
        executor.step(
            Plan(
                3,
                1,
                appended_rows=ints(1),
                appended_block_ids=ints(0),
                swap_in_src_block_ids=ints(1, 0),
                swap_in_dst_block_ids=ints(6, 5),
            )
        )
        resumed = executor.step(
            Plan(
                4,
                1,
                new_sequences=(self.row(2, [*self.PROMPT, token], [5, 6], num_computed=6),),
                chunk_rows=ints(2),
                chunk_lens=ints(1),
            )
        )
        tokens = dict(
            zip(resumed.sampled_rows.tolist(), resumed.sampled_token_ids.tolist(), strict=True)
        )
        assert [token, tokens[2]] == continue_greedily(self.PROMPT, 2)
        assert tokens[1] == continue_greedily([9] * 8, 3)[2]
        assert resumed.num_computed_tokens == 2


class TestWire:
    @staticmethod
    def parse(**lists):
        commands = worker_pb2.KvCommands(**{k: pack_int32(v) for k, v in lists.items()})
        return plan_of(worker_pb2.StepBatch(kv_commands=commands), LIMITS)

    def test_swaps_are_read(self):
        step = self.parse(swap_out_src_block_ids=[7, 7], swap_out_dst_block_ids=[5, 0])
        assert step.swap_out_src_block_ids.tolist() == [7, 7]
        assert step.swap_out_dst_block_ids.tolist() == [5, 0]

    @pytest.mark.parametrize(
        ("lists", "problem"),
        [
            (
                {"swap_out_src_block_ids": [8], "swap_out_dst_block_ids": [0]},
                r"kv_commands.swap_out_src_block_ids\[0\] is 8; it must be in \[0, 7\]",
            ),
            (
                {"swap_out_src_block_ids": [7], "swap_out_dst_block_ids": [6]},
                r"kv_commands.swap_out_dst_block_ids\[0\] is 6; it must be in \[0, 5\]",
            ),
            (
                {"swap_in_src_block_ids": [6], "swap_in_dst_block_ids": [0]},
                r"kv_commands.swap_in_src_block_ids\[0\] is 6; it must be in \[0, 5\]",
            ),
            (
                {"swap_in_src_block_ids": [1, 2], "swap_in_dst_block_ids": [4, 4]},
                "kv_commands.swap_in_dst_block_ids has 4 twice",
            ),
            (
                {"swap_in_src_block_ids": [1, 2], "swap_in_dst_block_ids": [4]},
                "one for each of swap_in_src_block_ids, 2",
            ),
            (
                {
                    "swap_out_src_block_ids": [0],
                    "swap_out_dst_block_ids": [0],
                    "swap_in_src_block_ids": [1],
                    "swap_in_dst_block_ids": [1],
                },
                "in a step that swaps out",
            ),
        ],
    )
    def test_a_wrong_swap_is_refused_by_name(self, lists, problem):
        with pytest.raises(InvalidArgumentError, match=problem):
            self.parse(**lists)
