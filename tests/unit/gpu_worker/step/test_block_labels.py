"""Labels follow bytes: they are copied with them, and removed when they are overwritten."""

import numpy as np
import pytest

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan, StepLogprob
from contract.worker_limits import Limits
from gpu_worker.step.block_labels import BlockLabels
from gpu_worker.step.rows import Rows

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=64,
    max_num_batched_tokens=64,
    num_blocks=16,
    block_size=4,
    vocab_size=10,
    num_host_blocks=8,
    num_disk_blocks=8,
)
NONE = np.empty(0, np.int32)


def ints(*values):
    return np.array(values, np.int32)


def label(number):
    return np.full((1, 32), number, np.uint8)


class Worker:
    def __init__(self):
        self.rows = Rows(LIMITS)
        self.labels = BlockLabels(LIMITS)
        self.num_steps = 0

    def step(self, *, named=None, failed=(), num_decodes=0, **fields):
        self.num_steps += 1
        named = named or {}
        step = Plan(
            self.num_steps,
            num_decodes,
            labelled_block_ids=ints(*named),
            labels=np.concatenate([np.empty((0, 32), np.uint8), *map(label, named.values())]),
            **{name: v if name == "new_sequences" else ints(*v) for name, v in fields.items()},
        )
        self.labels.apply(step, self.rows, self.rows.apply(step))
        self.labels.fail_swap_ins(step, ints(*failed))

    def tier(self, name="device"):
        held = getattr(self.labels, name).held()
        return dict(zip(held.block_ids.tolist(), held.labels[:, 0].tolist(), strict=True))


def new_row(row, blocks, num_tokens, num_computed=0, identity=b"i" * 32, **sampling):
    tokens = np.arange(num_tokens, dtype=np.int32) % 10
    params = SamplingParams(seed=0, **sampling)
    return NewSequence(
        row, row, tokens, num_tokens, num_computed, ints(*blocks), params, 60, identity=identity
    )


@pytest.fixture
def worker():
    return Worker()


def test_a_label_goes_where_the_block_is_copied(worker):
    worker.step(
        named={1: 10, 2: 20},
        swap_out_src_block_ids=[1, 3],
        swap_out_dst_block_ids=[5, 6],
        copy_src_block_ids=[1, 4],
        copy_dst_block_ids=[4, 1],
    )
    assert worker.tier() == {4: 10, 2: 20}, "block 1 has what block 4 had: no name"
    assert worker.tier("host") == {5: 10}
    worker.step(swap_in_src_block_ids=[5], swap_in_dst_block_ids=[2])
    assert worker.tier() == {4: 10, 2: 10}


def test_a_swap_out_over_a_labelled_host_block_takes_the_label_away(worker):
    worker.step(named={1: 10}, swap_out_src_block_ids=[1], swap_out_dst_block_ids=[5])
    worker.step(swap_out_src_block_ids=[3], swap_out_dst_block_ids=[5])
    assert worker.tier("host") == {}


def test_blocks_that_a_step_writes_lose_their_labels(worker):
    worker.step(named={block: block for block in range(6)})
    worker.step(new_sequences=(new_row(0, [1, 2, 3], 10, 2),), chunk_rows=[0], chunk_lens=[8])
    assert worker.tier() == {0: 0, 4: 4, 5: 5}
    worker.step(named={3: 30}, num_decodes=1)
    assert worker.tier() == {0: 0, 4: 4, 5: 5}, "a token was written to block 3 after that"


def test_labels_are_reported_in_their_order(worker):
    worker.step(named={7: 1})
    worker.step(named={2: 2, 5: 3})
    worker.step(named={7: 4})
    assert list(worker.tier().items()) == [(2, 2), (5, 3), (7, 4)]


def test_a_store_brings_its_label_when_it_has_ended(worker):
    worker.step(named={1: 10}, swap_out_src_block_ids=[1], swap_out_dst_block_ids=[5])
    worker.step(disk_store_src_block_ids=[5], disk_store_dst_block_ids=[7])
    worker.step(swap_out_src_block_ids=[3], swap_out_dst_block_ids=[5])
    assert worker.tier("disk") == {}
    worker.labels.end_stores(ints(7), NONE)
    assert worker.tier("disk") == {7: 10}
    worker.step(disk_load_src_block_ids=[7], disk_load_dst_block_ids=[2])
    assert worker.tier("host") == {}
    worker.labels.end_loads(ints(2), NONE)
    assert worker.tier("host") == {2: 10}


def test_a_store_of_what_turns_out_to_be_bad_brings_no_label(worker):
    worker.step(named={1: 10}, swap_out_src_block_ids=[1], swap_out_dst_block_ids=[5])
    worker.step(disk_store_src_block_ids=[5], disk_store_dst_block_ids=[7])
    worker.step(swap_in_src_block_ids=[5], swap_in_dst_block_ids=[2], failed=[2])
    worker.labels.end_stores(ints(7), NONE)
    assert worker.tier("disk") == {}


def test_a_load_that_fails_takes_the_label_from_the_disk(worker):
    worker.step(named={1: 10}, swap_out_src_block_ids=[1], swap_out_dst_block_ids=[5])
    worker.step(disk_store_src_block_ids=[5, 5], disk_store_dst_block_ids=[7, 6])
    worker.labels.end_stores(ints(7), ints(6))
    worker.step(disk_load_src_block_ids=[7], disk_load_dst_block_ids=[2])
    worker.labels.end_loads(NONE, ints(2))
    assert worker.tier("disk") == {}
    assert worker.tier("host") == {5: 10}


def test_a_failed_swap_in_makes_its_block_void_and_its_row_untold(worker):
    worker.step(named={1: 10}, swap_out_src_block_ids=[1], swap_out_dst_block_ids=[5])
    worker.step(swap_in_src_block_ids=[5], swap_in_dst_block_ids=[2], failed=[2])
    assert worker.tier() == {1: 10}
    assert worker.tier("host") == {}
    worker.step(new_sequences=(new_row(0, [2, 3], 6, 4),), chunk_rows=[0], chunk_lens=[2])
    worker.step(named={2: 20}, num_decodes=1)
    assert 2 not in worker.tier(), "it was labelled without knowing that it is void"
    assert worker.rows.held(worker.labels.has_void) == ()
    worker.step(copy_src_block_ids=[2], copy_dst_block_ids=[9], num_decodes=1)
    assert worker.labels.has_void(ints(9))
    worker.step(
        released_rows=[0],
        new_sequences=(new_row(1, [2, 4], 6),),
        chunk_rows=[1],
        chunk_lens=[6],
    )
    worker.step(named={2: 30}, num_decodes=1)
    assert worker.tier()[2] == 30
    assert len(worker.rows.held(worker.labels.has_void)) == 1


def test_copies_of_a_row_with_wrong_kv_lose_their_labels(worker):
    worker.step(new_sequences=(new_row(0, [1, 2], 6),), chunk_rows=[0], chunk_lens=[6])
    worker.step(
        named={1: 10, 5: 50}, num_decodes=1, swap_out_src_block_ids=[1], swap_out_dst_block_ids=[3]
    )
    worker.labels.distrust(worker.rows, np.array([0]))
    worker.step(named={2: 20}, num_decodes=1)
    assert worker.tier() == {5: 50}
    assert worker.tier("host") == {}
    assert worker.rows.held(worker.labels.has_void) == ()


class TestHeldRows:
    def test_holdings_have_every_field_of_a_row(self, worker):
        new = (new_row(0, [1, 2], 6), new_row(1, [3, 4], 6, identity=b""))
        worker.step(new_sequences=new, chunk_rows=[0], chunk_lens=[6])
        worker.rows.token_ids[0, 6] = 9
        (held,) = worker.rows.held(worker.labels.has_void)
        assert held.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 9]
        assert held.num_computed_tokens == 6
        assert held.block_ids.tolist() == [1, 2]
        assert (held.has_stopped, held.had_logprobs) == (False, False)

    def test_a_row_that_stopped_ends_there_however_long_it_goes_on_in_name(self, worker):
        row = new_row(0, [1, 2], 6, logprobs=0)
        worker.step(new_sequences=(row,), chunk_rows=[0], chunk_lens=[6])
        one = np.array([0])
        worker.rows.end(one, worker.rows.incarnation[one], np.array([7]), np.array([True]))
        worker.step(num_decodes=1)
        (held,) = worker.rows.held(worker.labels.has_void)
        assert (len(held.token_ids), held.num_computed_tokens) == (7, 6)
        assert (held.has_stopped, held.had_logprobs) == (True, True)

    def test_the_log_probabilities_of_the_last_tokens_are_reported(self, worker):
        rows = worker.rows
        worker.step(new_sequences=(new_row(0, [1, 2], 6), new_row(1, [3, 4], 6)))
        before = rows.incarnation[[1, 0]]
        for number in range(40):
            rows.store_logprobs(np.array([1, 0]), before, [logprob(0, number), logprob(1, -number)])
        worker.step(released_rows=[1], new_sequences=(new_row(1, [5, 6], 6),))
        rows.store_logprobs(np.array([1, 0]), before, [logprob(0, 40), logprob(1, -40)])
        first, second = rows.held(worker.labels.has_void)
        assert [each.logprob for each in first.logprobs] == [-float(n) for n in range(9, 41)]
        assert second.logprobs == (), "those that come late are another's"


def logprob(index, value):
    return StepLogprob(index, float(value), ints(), np.empty(0, np.float32))
