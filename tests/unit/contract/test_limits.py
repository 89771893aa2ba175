"""The sizes that follow from a worker's limits."""

import pytest

from contract.worker_limits import Limits


@pytest.mark.parametrize(
    ("kv_windows", "num_blocks", "least"),
    [
        ((None,), 100, 16),
        ((None,), 10, 10),
        ((8,), 100, 17),
        ((None, 8), 100, 33),
        ((None, 8), 20, 20),
    ],
)
def test_the_fewest_blocks_hold_the_longest_row_and_the_null_block(kv_windows, num_blocks, least):
    limits = Limits(
        max_num_seqs=2,
        max_model_len=64,
        max_num_batched_tokens=8,
        num_blocks=num_blocks,
        block_size=4,
        vocab_size=10,
        kv_windows=kv_windows,
    )
    assert limits.min_num_blocks == least
