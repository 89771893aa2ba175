import numpy as np
import pytest

from contract.errors import InconsistentPlanError, InvalidArgumentError
from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.step.rows import Rows

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=16,
    max_num_batched_tokens=12,
    num_blocks=10,
    block_size=4,
    vocab_size=50,
)


def ints(*values):
    return np.array(values, np.int32)


def new_row(row, tokens, blocks, *, computed=0, max_total=16, num_prompt=None):
    return NewSequence(
        seq_id=row,
        row=row,
        token_ids=ints(*tokens),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        num_computed_tokens=computed,
        block_ids=ints(*blocks),
        sampling=SamplingParams(seed=0),
        max_total_tokens=max_total,
    )


def step(step_id=1, num_decodes=0, **parts):
    arrays = {name: ints(*value) for name, value in parts.items() if name != "new_sequences"}
    return Plan(step_id, num_decodes, new_sequences=tuple(parts.get("new_sequences", ())), **arrays)


def facts(scheduled):
    return (
        scheduled.rows.tolist(),
        scheduled.starts.tolist(),
        scheduled.lens.tolist(),
        scheduled.num_decodes,
        scheduled.sampling.tolist(),
    )


@pytest.fixture
def rows():
    return Rows(LIMITS)


def test_a_sequence_prefills_in_chunks_then_decodes(rows):
    first = step(
        new_sequences=[new_row(2, [5, 6, 7, 8, 9], [3, 1])], chunk_rows=[2], chunk_lens=[3]
    )
    assert facts(rows.apply(first)) == ([2], [0], [3], 0, [])
    # A row that the plan does not name waits, and does not decode.
    assert facts(rows.apply(step())) == ([], [], [], 0, [])
    last = step(chunk_rows=[2], chunk_lens=[2])
    assert facts(rows.apply(last)) == ([2], [3], [2], 0, [0])
    assert facts(rows.apply(step(num_decodes=1))) == ([2], [5], [1], 1, [0])
    assert facts(rows.apply(step(num_decodes=1))) == ([2], [6], [1], 1, [0])
    assert (rows.num_computed[2], rows.num_tokens[2]) == (7, 8)
    assert rows.block_tables[2].tolist() == [3, 1, 0, 0]


def test_decodes_come_first_in_row_order_then_chunks_as_named(rows):
    rows.apply(
        step(
            new_sequences=[
                new_row(3, [1], [0]),
                new_row(1, [1, 2], [1]),
                new_row(0, [1, 2, 3], [2]),
                new_row(2, [1, 2, 3, 4], [4]),
            ],
            chunk_rows=[3, 1],
            chunk_lens=[1, 2],
        )
    )
    mixed = rows.apply(step(num_decodes=2, chunk_rows=[2, 0], chunk_lens=[3, 3]))
    assert facts(mixed) == ([1, 3, 2, 0], [2, 1, 0, 0], [1, 1, 3, 3], 2, [0, 1, 3])


def test_a_resumed_sequence_computes_only_what_is_missing(rows):
    resumed = new_row(0, [1, 2, 3, 4, 5, 6], [7, 8], computed=4, num_prompt=3)
    scheduled = rows.apply(step(new_sequences=[resumed], chunk_rows=[0], chunk_lens=[2]))
    assert facts(scheduled) == ([0], [4], [2], 0, [0])


def test_a_row_stops_decoding_at_its_length(rows):
    rows.apply(
        step(new_sequences=[new_row(0, [1, 2], [0], max_total=4)], chunk_rows=[0], chunk_lens=[2])
    )
    assert facts(rows.apply(step(num_decodes=1))) == ([0], [2], [1], 1, [0])
    # Four tokens are known; the last one is not computed.
    assert facts(rows.apply(step(num_decodes=0))) == ([], [], [], 0, [])
    assert rows.num_used == 1


def test_a_row_that_needs_one_token_only_never_decodes(rows):
    only = new_row(0, [1, 2], [0], max_total=3)
    rows.apply(step(new_sequences=[only], chunk_rows=[0], chunk_lens=[2]))
    assert facts(rows.apply(step(num_decodes=0)))[0] == []
    with pytest.raises(
        InvalidArgumentError, match="chunk_rows has 0, which already has its max_total"
    ):
        rows.apply(step(chunk_rows=[0], chunk_lens=[1]))


def test_an_ended_row_is_counted_but_not_computed_until_it_is_released(rows):
    rows.apply(
        step(
            new_sequences=[new_row(0, [1], [0], max_total=4), new_row(1, [1], [1, 2])],
            chunk_rows=[0, 1],
            chunk_lens=[1, 1],
        )
    )
    rows.end(np.array([0]), rows.incarnation[[0]], np.array([4]), np.array([True]))
    assert facts(rows.apply(step(num_decodes=2)))[0] == [1]
    assert facts(rows.apply(step(num_decodes=2)))[0] == [1]
    # By the scheduler's count it has reached its length now; the scheduler may not know of the end.
    assert facts(rows.apply(step(num_decodes=1)))[0] == [1]
    assert facts(rows.apply(step(num_decodes=1, released_rows=[0])))[0] == [1]
    assert rows.num_used == 1


def test_a_released_row_is_free_for_the_next_in_the_same_step(rows):
    rows.apply(step(new_sequences=[new_row(0, [1], [0])], chunk_rows=[0], chunk_lens=[1]))
    late = rows.incarnation[[0]].copy()
    rows.apply(
        step(
            released_rows=[0],
            new_sequences=[new_row(0, [8, 9], [5])],
            chunk_rows=[0],
            chunk_lens=[1],
        )
    )
    assert rows.num_used == 1
    # The first sequence's late result does not affect the second one.
    rows.end(np.array([0]), late, np.array([4]), np.array([True]))
    rows.store_sampled(np.array([0]), late, np.array([1]), np.array([44]))
    assert rows.has_ended(np.array([0]), late)
    assert not rows.has_ended(np.array([0]), rows.incarnation[[0]])
    assert rows.token_ids[0, :2].tolist() == [8, 9]


def test_blocks_are_appended_before_anything_is_computed(rows):
    new = new_row(0, [1, 2, 3, 4], [6])
    rows.apply(step(new_sequences=[new], chunk_rows=[0], chunk_lens=[4]))
    grown = step(num_decodes=1, appended_rows=[0], appended_block_ids=[9])
    assert facts(rows.apply(grown)) == ([0], [4], [1], 1, [0])
    assert rows.block_tables[0, :2].tolist() == [6, 9]


def test_a_wrong_number_of_decodes_breaks_an_invariant(rows):
    rows.apply(step(new_sequences=[new_row(0, [1], [0])], chunk_rows=[0], chunk_lens=[1]))
    with pytest.raises(
        InconsistentPlanError, match="num_decodes is 0, but 1 rows decode in step 7"
    ):
        rows.apply(step(step_id=7, num_decodes=0))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"released_rows": [1]}, "released_rows has 1, which is free"),
        ({"new_sequences": [new_row(0, [1], [0])]}, "new_sequences.row is 0, which is in use"),
        ({"appended_rows": [3], "appended_block_ids": [1]}, "appended_rows has 3, which is free"),
        ({"chunk_rows": [1], "chunk_lens": [1]}, "chunk_rows has 1, which is free"),
        ({"chunk_rows": [0], "chunk_lens": [1]}, "chunk_rows has 0, which decodes"),
        ({"chunk_rows": [2], "chunk_lens": [4]}, "chunk_lens has 4, more tokens than"),
        ({}, "appended_rows lacks 0: its block table is too short"),
        (
            {
                "appended_rows": [0],
                "appended_block_ids": [1],
                "new_sequences": [new_row(1, [1] * 12, [2, 3, 4])],
                "chunk_rows": [1],
                "chunk_lens": [12],
            },
            "chunk_lens makes 13 tokens with the decodes; a step computes at most 12",
        ),
    ],
)
def test_a_batch_that_contradicts_the_rows_is_refused_by_field(rows, parts, message):
    # Row 0 decodes and its block is full; row 2 has three tokens to compute.
    rows.apply(
        step(
            new_sequences=[new_row(0, [1, 2, 3, 4], [0]), new_row(2, [1, 2, 3], [9])],
            chunk_rows=[0],
            chunk_lens=[4],
        )
    )
    with pytest.raises(InvalidArgumentError, match=message):
        rows.apply(step(num_decodes=1, **parts))


def test_a_full_block_table_takes_no_more(rows):
    rows.apply(step(new_sequences=[new_row(0, [1], [0, 1, 2, 3])]))
    with pytest.raises(
        InvalidArgumentError, match="appended_rows has 0, whose block table is full"
    ):
        rows.apply(step(appended_rows=[0], appended_block_ids=[4]))


def test_clear_frees_all_rows(rows):
    rows.apply(step(new_sequences=[new_row(0, [1], [0])], chunk_rows=[0], chunk_lens=[1]))
    rows.clear()
    assert rows.num_used == 0
    assert facts(rows.apply(step(num_decodes=0)))[0] == []


def test_renamed_blocks_change_every_table_with_this_steps_changes(rows):
    rows.apply(step(new_sequences=[new_row(0, [1, 2, 3, 4, 5], [3, 1])]))
    changed = step(
        new_sequences=[new_row(1, [1, 2, 3, 4, 5], [3, 2])],
        appended_rows=[0],
        appended_block_ids=[7],
        renamed_src_block_ids=[3, 7, 9],
        renamed_dst_block_ids=[0, 9, 5],
    )
    rows.apply(changed)
    assert rows.block_tables[0, :3].tolist() == [0, 1, 9]
    assert rows.block_tables[1, :2].tolist() == [0, 2]
