"""The fake worker must fail if a plan breaks the contract."""

from dataclasses import replace

import numpy as np
import pytest

from contract.arrays import ints
from contract.step import NewSequence, Plan
from scheduler_svc.core.interface.config import SchedulerConfig
from tests.property.disk import BROKEN
from tests.property.oracle import expected_output
from tests.property.worker import FakeWorker

CONFIG = SchedulerConfig(
    num_blocks=6,
    block_size=2,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    max_model_len=12,
    num_host_blocks=3,
    num_disk_blocks=3,
)
PROMPT = [0, 1, 0]  # its output does not stop at once
NOTHING = Plan(step_id=1, num_decodes=0)


def make_worker():
    """Return a worker with PROMPT in blocks 0 and 1, whose disk moves end only on demand."""
    worker = FakeWorker(CONFIG)
    worker.disk.ends_per_step = 0
    new = NewSequence(
        seq_id=1,
        row=0,
        token_ids=np.array(PROMPT, np.int32),
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=np.array([0, 1, 2], np.int32),
        sampling=b"",
        output_index=0,
        max_total_tokens=6,
        traceparent="",
    )
    plan = step(new_sequences=(new,), chunk_rows=[0], chunk_lens=[3])
    outcome = worker.execute(plan)
    assert outcome.sampled_token_ids.tolist() == expected_output("", 0, PROMPT, 3)[:1]
    assert not worker.rows[0].ended
    return worker


def step(**changes):
    lists = {name: ints(value) for name, value in changes.items() if isinstance(value, list)}
    return replace(NOTHING, **{**changes, **lists})


def decode(**changes):
    return step(num_decodes=1, **changes)


def swap_out(sources, targets):
    return {"swap_out_src_block_ids": sources, "swap_out_dst_block_ids": targets}


def swap_in(sources, targets):
    return {"swap_in_src_block_ids": sources, "swap_in_dst_block_ids": targets}


def copy(sources, targets):
    return {"copy_src_block_ids": sources, "copy_dst_block_ids": targets}


def rename(sources, targets):
    return {"renamed_src_block_ids": sources, "renamed_dst_block_ids": targets}


def store(sources, targets):
    return {"disk_store_src_block_ids": sources, "disk_store_dst_block_ids": targets}


def load(sources, targets):
    return {"disk_load_src_block_ids": sources, "disk_load_dst_block_ids": targets}


def test_a_table_follows_its_blocks():
    worker = make_worker()
    worker.execute(decode(**copy([0, 1], [1, 4]), **rename([0, 1], [1, 4])))
    assert worker.rows[0].blocks == [1, 4, 2]


def test_a_table_that_follows_blocks_whose_content_did_not_move_reads_wrong_kv():
    worker = make_worker()
    with pytest.raises(AssertionError, match="wrong KV at position 0"):
        worker.execute(decode(**rename([0], [4])))


def test_a_block_is_not_renamed_to_one_that_a_table_names():
    worker = make_worker()
    with pytest.raises(AssertionError, match="that a table names"):
        worker.execute(decode(**rename([0], [2])))


def test_a_copy_does_not_read_blocks_that_are_being_swapped_in():
    worker = make_worker()
    worker.execute(decode(**swap_out([0], [0])))
    with pytest.raises(AssertionError, match="being swapped in"):
        worker.execute(decode(**swap_in([0], [3]), **copy([3], [4])))


def test_the_disk_gives_back_what_it_took():
    worker = make_worker()
    worker.execute(decode(**swap_out([0], [0])))
    content = worker.host[0]
    outcome = worker.execute(decode(**store([0], [2])))
    assert not len(outcome.stored_disk_block_ids)
    worker.disk.ends_per_step = 1
    outcome = worker.execute(decode())
    assert outcome.stored_disk_block_ids.tolist() == [2]
    outcome = worker.execute(step(released_rows=[0], **load([2], [1])))
    assert outcome.loaded_host_block_ids.tolist() == [1]
    assert worker.host[1] == content


def test_a_store_reads_before_its_step_writes_the_host():
    worker = make_worker()
    worker.execute(decode(**swap_out([0], [0])))
    content = worker.host[0]
    worker.disk.ends_per_step = 1
    worker.execute(decode(**store([0], [0]), **swap_out([1], [0])))
    assert worker.disk.blocks == {0: content}
    assert worker.host[0] != content


def test_a_step_that_computes_nothing_ends_a_move():
    worker = make_worker()
    worker.execute(decode(**swap_out([0, 1], [0, 1])))
    outcome = worker.execute(step(released_rows=[0], **store([0, 1], [0, 1])))
    assert len(outcome.stored_disk_block_ids) == 1


@pytest.fixture
def stored():
    """A worker with host block 0 on disk blocks 0 and 1."""
    worker = make_worker()
    worker.disk.ends_per_step = 2
    worker.execute(decode(**swap_out([0], [0])))
    worker.execute(decode(**store([0, 0], [0, 1])))
    worker.disk.ends_per_step = 0
    return worker


def test_moves_fail_if_what_they_read_is_broken(stored):
    stored.disk.corrupt([0, 2])
    stored.corrupt_host([0, 2])
    assert BROKEN in stored.host[0]
    stored.disk.ends_per_step = 2
    outcome = stored.execute(decode(**store([0], [2]), **load([0], [1])))
    assert outcome.failed_disk_block_ids.tolist() == [2]
    assert outcome.failed_host_block_ids.tolist() == [1]
    assert set(stored.disk.blocks) == {0, 1}
    assert set(stored.host) == {0}


def test_moves_fail_by_chance(stored):
    stored.disk.failure_rate = 1.0
    stored.disk.ends_per_step = 2
    outcome = stored.execute(decode(**store([0], [2]), **load([0], [1])))
    assert outcome.failed_disk_block_ids.tolist() == [2]
    assert outcome.failed_host_block_ids.tolist() == [1]


@pytest.mark.parametrize(
    ("first", "then", "error"),
    [
        (load([0], [1]), swap_in([1], [3]), "swap-in reads a host block that holds nothing"),
        ({}, load([0], [1]) | swap_in([1], [3]), "swap-in reads a host block that holds nothing"),
        (load([0], [1]), swap_out([1], [1]), "writes a host block being loaded"),
        ({}, load([0], [1]) | swap_out([1], [1]), "writes a host block being loaded"),
        (load([0], [1]), load([1], [1]), "two loads write one host block"),
        ({}, load([0, 1], [1, 1]), "named twice"),
        (load([0], [1]), store([1], [2]), "store reads a host block that holds nothing"),
        (load([0], [1]), store([0], [0]), "that a move under way uses"),
        (store([0], [2]), store([0], [2]), "that a move under way uses"),
        (store([0], [2]), load([2], [1]), "load reads a disk block that holds nothing"),
        ({}, store([0], [0]) | load([0], [1]), "load reads a disk block that holds nothing"),
        ({}, swap_in([1], [3]), "swap-in reads a host block that holds nothing"),
        ({}, swap_out([0], [2]) | swap_in([0], [3]), "swaps out and in"),
    ],
)
def test_breaches_of_the_contract_are_detected(stored, first, then, error):
    new = NewSequence(1, 1, np.array([0], np.int32), 1, 0, np.array([5], np.int32), b"", 9)
    stored.execute(step(released_rows=[0], new_sequences=(new,), **decodes(1, chunk=True), **first))
    with pytest.raises(AssertionError, match=error):
        stored.execute(step(**decodes(1), **then))


def decodes(row, *, chunk=False):
    """Compute one token, so that no disk move must end."""
    return {"chunk_rows": [row], "chunk_lens": [1]} if chunk else {"num_decodes": 1}
