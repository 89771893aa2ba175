"""Conversion of plans to messages, and of a worker's messages to results and holdings."""

import numpy as np
import pytest

from contract.codec.info import worker_info_from_proto, worker_info_to_proto
from contract.codec.packing import pack_int32
from contract.codec.search import search_to_note
from contract.codec.state import check_holdings, holdings_from_proto, holdings_to_proto
from contract.codec.step import plan_to_proto, result_from_proto, token_logprob_to_proto
from contract.errors import InvalidArgumentError
from contract.hashing import BlockHash
from contract.info import ModelInfo
from contract.step import NewSequence, OutputState, Plan, SearchState
from quire.v1 import common_pb2, worker_pb2
from scheduler_svc import app
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.wire.beam import with_candidates

MODEL = ModelInfo(id="m", max_model_len=64, vocab_size=100, eos_token_ids=(1,))


LOGPROB = common_pb2.TokenLogprob(logprob=-1.5, top_token_ids=[3], top_logprobs=[-0.5])


def ints(*values):
    return np.array(values, np.int32)


def test_plan_becomes_a_batch():
    sampling = common_pb2.SamplingParams(temperature=0.0, seed=5, logit_bias={3: 1.0})
    plan = Plan(
        step_id=4,
        released_rows=ints(9),
        new_sequences=(
            NewSequence(
                seq_id=1,
                row=2,
                token_ids=ints(5, 6, 7),
                num_prompt_tokens=2,
                num_computed_tokens=1,
                block_ids=ints(8),
                sampling=sampling.SerializeToString(),
                output_index=3,
                max_total_tokens=20,
                traceparent="t",
            ),
        ),
        appended_rows=ints(0, 1),
        appended_block_ids=ints(30, 31),
        copy_src_block_ids=ints(1),
        copy_dst_block_ids=ints(2),
        chunk_rows=ints(2),
        chunk_lens=ints(2),
        num_decodes=5,
        pins=((BlockHash(b"p" * 32), 2.5), (BlockHash(b"q" * 32), 3.0)),
    )
    assert plan_to_proto(plan, epoch=6, step_id_base=100) == worker_pb2.StepBatch(
        epoch=6,
        step_id=104,
        released_rows=pack_int32([9]),
        new_sequences=[
            worker_pb2.NewSequence(
                seq_id=1,
                row=2,
                token_ids=pack_int32([5, 6, 7]),
                num_prompt_tokens=2,
                num_computed_tokens=1,
                block_ids=pack_int32([8]),
                sampling=sampling,
                max_total_tokens=20,
                traceparent="t",
                output_index=3,
            )
        ],
        appended_rows=pack_int32([0, 1]),
        appended_block_ids=pack_int32([30, 31]),
        kv_commands=worker_pb2.KvCommands(
            copy_src_block_ids=pack_int32([1]), copy_dst_block_ids=pack_int32([2])
        ),
        chunk_rows=pack_int32([2]),
        chunk_lens=pack_int32([2]),
        num_decodes=5,
        pinned_labels=b"p" * 32 + b"q" * 32,
        pinned_s=[2.5, 3.0],
    )


def test_a_result_is_read_from_its_message():
    result = result_from_proto(
        worker_pb2.StepResult(
            step_id=104,
            sampled_rows=pack_int32([0, 3]),
            sampled_token_ids=pack_int32([7, 8]),
            stopped_rows=pack_int32([3]),
            failed_rows=pack_int32([1]),
            execute_s=0.5,
        ),
        step_id_base=100,
        max_num_seqs=4,
    )
    assert result.step_id == 4
    assert result.sampled_rows.tolist() == [0, 3]
    assert result.sampled_token_ids.tolist() == [7, 8]
    assert result.stopped_rows.tolist() == [3]
    assert result.failed_rows.tolist() == [1]
    assert result.execute_s == 0.5


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sampled_rows": b"abc"}, "sampled_rows has 3 bytes"),
        ({"sampled_rows": pack_int32([0])}, "sampled_token_ids has 0 entries"),
        ({"stopped_rows": pack_int32([4])}, r"stopped_rows\[0\] is 4"),
        ({"failed_rows": pack_int32([0, -1])}, r"failed_rows\[1\] is -1"),
    ],
)
def test_wrong_result_is_named(fields, problem):
    with pytest.raises(InvalidArgumentError, match=problem):
        result_from_proto(worker_pb2.StepResult(**fields), step_id_base=0, max_num_seqs=4)


@pytest.mark.parametrize(
    "field", ["max_num_seqs", "num_blocks", "block_size", "max_num_batched_tokens"]
)
def test_worker_without_room_is_named(field):
    sizes = {"max_num_seqs": 1, "num_blocks": 1, "block_size": 1, "max_num_batched_tokens": 1}
    model = common_pb2.ModelInfo(max_model_len=1, vocab_size=1)
    assert (
        worker_info_from_proto(worker_pb2.WorkerInfo(model=model, **sizes)).limits.num_blocks == 1
    )
    with pytest.raises(InvalidArgumentError, match=f"{field} is 0"):
        worker_info_from_proto(worker_pb2.WorkerInfo(model=model, **(sizes | {field: 0})))


def test_a_worker_may_say_how_many_tokens_keep_it_busy():
    sizes = {"max_num_seqs": 1, "num_blocks": 1, "block_size": 1, "max_num_batched_tokens": 8}
    model = common_pb2.ModelInfo(max_model_len=1, vocab_size=1)
    message = worker_pb2.WorkerInfo(model=model, **sizes)
    assert worker_info_from_proto(message).limits.num_saturating_tokens is None
    message.num_saturating_tokens = 8
    assert worker_info_from_proto(message).limits.num_saturating_tokens == 8
    message.num_saturating_tokens = 9
    with pytest.raises(InvalidArgumentError, match="num_saturating_tokens is 9"):
        worker_info_from_proto(message)


def test_a_worker_may_say_how_many_prompt_tokens_are_almost_free():
    sizes = {"max_num_seqs": 1, "num_blocks": 1, "block_size": 1, "max_num_batched_tokens": 8}
    model = common_pb2.ModelInfo(max_model_len=1, vocab_size=1)
    message = worker_pb2.WorkerInfo(model=model, min_prompt_tokens=8, **sizes)
    info = worker_info_from_proto(message)
    assert app._configure_core(SchedulerSettings(_env_file=None), info).min_prompt_tokens == 8
    assert worker_info_to_proto(info).min_prompt_tokens == 8
    message.min_prompt_tokens = 9
    with pytest.raises(InvalidArgumentError, match="min_prompt_tokens is 9"):
        worker_info_from_proto(message)


def test_worker_that_takes_kv_says_which_it_is():
    sizes = {"max_num_seqs": 1, "num_blocks": 1, "block_size": 1, "max_num_batched_tokens": 1}
    model = common_pb2.ModelInfo(max_model_len=1, vocab_size=1)
    message = worker_pb2.WorkerInfo(model=model, takes_kv=True, instance_id=2**64 - 1, **sizes)
    info = worker_info_from_proto(message)
    assert (info.takes_kv, info.instance_id) == (True, 2**64 - 1)
    message.instance_id = 0
    with pytest.raises(InvalidArgumentError, match="instance_id is 0"):
        worker_info_from_proto(message)


def test_only_beams_have_candidates():
    message = worker_pb2.StepResult(
        step_id=1,
        sampled_rows=pack_int32([3, 0, 2]),
        sampled_token_ids=pack_int32([5, 6, 7]),
        logprobs=[
            worker_pb2.SampledLogprob(
                index=index,
                logprob=common_pb2.TokenLogprob(
                    top_token_ids=[10 + index, 20 + index], top_logprobs=[-0.5, -1.5]
                ),
            )
            for index in (0, 1)
        ],
    )
    result = result_from_proto(message, step_id_base=0, max_num_seqs=4)
    assert with_candidates(result, message.logprobs, frozenset()) is result
    outcome = with_candidates(result, message.logprobs, frozenset({1, 2, 3}))
    assert outcome.candidate_rows.tolist() == [3, 2]
    assert outcome.candidate_counts.tolist() == [2, 0], "the worker said nothing of row 2"
    assert outcome.candidate_token_ids.tolist() == [10, 20]
    assert outcome.candidate_logprobs.tolist() == [-0.5, -1.5]


class TestHoldings:
    INFO = worker_info_from_proto(
        worker_pb2.WorkerInfo(
            model=common_pb2.ModelInfo(max_model_len=16, vocab_size=100),
            max_num_seqs=2,
            max_num_batched_tokens=2,
            num_blocks=8,
            block_size=4,
            num_host_blocks=4,
        )
    )
    ROW = worker_pb2.HeldRow(
        identity=b"i" * 32,
        token_ids=pack_int32([5, 6, 7]),
        num_computed_tokens=2,
        block_ids=pack_int32([7]),
        has_stopped=True,
        had_logprobs=True,
        logprobs=[LOGPROB, LOGPROB],
    )
    NAMED = worker_pb2.HeldBlocks(block_ids=pack_int32([3, 1]), labels=b"a" * 32 + b"b" * 32)

    PINS = worker_pb2.HeldPins(labels=b"a" * 32 + b"d" * 32, left_s=[1.5, 60.0])

    def test_parts_make_a_whole_that_can_be_recorded(self):
        other = worker_pb2.HeldBlocks(block_ids=pack_int32([0]), labels=b"c" * 32)
        parts = [
            worker_pb2.ReadHoldingsResponse(rows=[self.ROW], host=self.NAMED),
            worker_pb2.ReadHoldingsResponse(rows=[self.ROW], host=other, pins=self.PINS),
        ]
        holdings = holdings_from_proto(parts)
        assert list(holdings.host.block_ids) == [3, 1, 0]
        assert holdings.host.hashes == [b"a" * 32, b"b" * 32, b"c" * 32]
        assert len(holdings.rows) == 2
        assert [*map(token_logprob_to_proto, holdings.rows[0].logprobs)] == [LOGPROB] * 2
        assert holdings.pins == ((b"a" * 32, 1.5), (b"d" * 32, 60.0))
        check_holdings(holdings, self.INFO)
        assert holdings_to_proto(holdings_from_proto([holdings_to_proto(holdings)])) == (
            holdings_to_proto(holdings)
        )

    @pytest.mark.parametrize(
        ("field", "value", "problem"),
        [
            ("block_ids", pack_int32([8]), r"rows.block_ids\[0\] is 8"),
            ("block_ids", pack_int32([1, 1]), "rows.block_ids has 1 twice"),
            ("block_ids", b"", "rows.num_computed_tokens is or has 2; the limit is 0"),
            ("num_computed_tokens", 3, "rows.num_computed_tokens is or has 3; the limit is 2"),
            ("token_ids", pack_int32([1, 100, 2]), r"rows.token_ids\[1\] is 100"),
            ("token_ids", pack_int32([1, -1, 2]), r"rows.token_ids\[1\] is -1"),
            ("token_ids", pack_int32([1] * 17), "rows.token_ids is or has 17; the limit is 16"),
            ("logprobs", [LOGPROB] * 2, "rows.logprobs is or has 4; the limit is 3"),
            ("logprobs", [common_pb2.TokenLogprob(top_token_ids=[1])], "top_logprobs has 0"),
            (
                "logprobs",
                [common_pb2.TokenLogprob(top_token_ids=[100], top_logprobs=[-1])],
                r"rows.logprobs.top_token_ids\[0\] is 100",
            ),
        ],
    )
    def test_a_row_that_cannot_be_is_refused(self, field, value, problem):
        row = worker_pb2.HeldRow()
        row.CopyFrom(self.ROW)
        if field == "logprobs":
            row.logprobs.extend(value)
        else:
            setattr(row, field, value)
        with pytest.raises(InvalidArgumentError, match=problem):
            check_holdings(
                holdings_from_proto([worker_pb2.ReadHoldingsResponse(rows=[row])]), self.INFO
            )

    def test_how_far_a_search_is_comes_back_as_it_was_sent(self):
        search = SearchState(
            (
                OutputState(3, ints(), np.float32(-0.1)),
                OutputState(1, ints(7, 8), np.float32(-0.3)),
            ),
            (OutputState(2, ints(1), np.float32(-2.5)),),
        )
        row = worker_pb2.HeldRow()
        row.CopyFrom(self.ROW)
        row.note = search_to_note(search)
        holdings = holdings_from_proto([worker_pb2.ReadHoldingsResponse(rows=[row])])
        check_holdings(holdings, self.INFO)
        assert str(holdings.rows[0].search) == str(search)
        assert holdings_to_proto(holdings).rows[0].note == row.note

    @pytest.mark.parametrize(
        ("output", "problem"),
        [
            ({"token_ids": b"abc"}, "rows.note.token_ids has 3 bytes"),
            ({"token_ids": pack_int32([100])}, r"rows.note.token_ids\[0\] is 100"),
            (
                {"token_ids": pack_int32([1] * 17)},
                "rows.note.token_ids is or has 17; the limit is 16",
            ),
            (
                {"token_ids": pack_int32([1] * 14), "num_shared_tokens": 3},
                "rows.note.token_ids is or has 17; the limit is 16",
            ),
            (
                {"num_shared_tokens": 4},
                "rows.note.num_shared_tokens is or has 4; the limit is 3",
            ),
            ({"logprob": float("nan")}, "rows.note.logprob is nan"),
        ],
    )
    @pytest.mark.parametrize("kind", ["beams", "hypotheses"])
    def test_an_output_of_a_search_that_cannot_be_is_refused(self, kind, output, problem):
        self.expect_note_refused(worker_pb2.SearchNote(**{kind: [output]}), problem)

    @pytest.mark.parametrize("kind", ["beams", "hypotheses"])
    def test_a_search_of_more_outputs_than_one_may_have_is_refused(self, kind):
        note = worker_pb2.SearchNote(**{kind: [{"num_shared_tokens": 1}] * 11})
        self.expect_note_refused(note, f"rows.note.{kind} is or has 11; the limit is 10")

    def test_a_note_that_is_none_is_refused(self):
        row = worker_pb2.HeldRow()
        row.CopyFrom(self.ROW)
        row.note = b"\xff"
        with pytest.raises(InvalidArgumentError, match=r"rows\.note is no SearchNote"):
            holdings_from_proto([worker_pb2.ReadHoldingsResponse(rows=[row])])

    def expect_note_refused(self, note, problem):
        row = worker_pb2.HeldRow()
        row.CopyFrom(self.ROW)
        row.note = note.SerializeToString()
        with pytest.raises(InvalidArgumentError, match=problem):
            check_holdings(
                holdings_from_proto([worker_pb2.ReadHoldingsResponse(rows=[row])]), self.INFO
            )

    def test_labels_that_are_not_parallel_are_refused(self):
        blocks = worker_pb2.HeldBlocks(block_ids=pack_int32([1]), labels=b"a" * 31)
        with pytest.raises(InvalidArgumentError, match=r"disk\.labels has 31 bytes"):
            holdings_from_proto([worker_pb2.ReadHoldingsResponse(disk=blocks)])

    @pytest.mark.parametrize(
        ("labels", "left_s", "problem"),
        [
            (b"a" * 31, [1.0], r"pins\.labels has 31 bytes"),
            (b"a" * 32, [float("nan")], r"pins\.left_s is nan"),
            (b"a" * 32, [0.0], r"pins\.left_s is 0"),
            (b"a" * 32, [1e9], r"pins\.left_s is 1000000000"),
            (b"a" * 64, [1.0, 2.0], r"pins\.labels has a label twice"),
        ],
    )
    def test_pins_that_cannot_be_are_refused(self, labels, left_s, problem):
        pins = worker_pb2.HeldPins(labels=labels, left_s=left_s)
        with pytest.raises(InvalidArgumentError, match=problem):
            check_holdings(
                holdings_from_proto([worker_pb2.ReadHoldingsResponse(pins=pins)]), self.INFO
            )

    def test_more_rows_or_blocks_than_there_are_are_refused(self):
        rows = holdings_from_proto([worker_pb2.ReadHoldingsResponse(rows=[self.ROW] * 3)])
        with pytest.raises(InvalidArgumentError, match=r"rows is or has 3; the limit is 2"):
            check_holdings(rows, self.INFO)
        disk = holdings_from_proto([worker_pb2.ReadHoldingsResponse(disk=self.NAMED)])
        with pytest.raises(InvalidArgumentError, match=r"disk\.block_ids\[0\] is 3"):
            check_holdings(disk, self.INFO)
