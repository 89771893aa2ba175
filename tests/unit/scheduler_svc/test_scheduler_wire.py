"""Between the messages and the scheduler's own types."""

from dataclasses import replace

import numpy as np
import pytest

from quire.v1 import common_pb2, scheduler_pb2, worker_pb2
from rpc.errors import InvalidArgumentError, TooBusyError
from rpc.packing import pack_int32, pack_uint64, unpack_int32, unpack_uint64
from scheduler_svc.core.beam_search import BeamParams, EarlyStopping
from scheduler_svc.core.plan import Admitted, Finished, News, NewSequence, Pinned, StepPlan
from scheduler_svc.core.request import FinishReason
from scheduler_svc.domain import ModelInfo
from scheduler_svc.wire.holdings import check_holdings, holdings_from_proto, holdings_to_proto
from scheduler_svc.wire.router import (
    merge_step_outputs,
    news_to_proto,
    refused_to_proto,
    request_from_proto,
)
from scheduler_svc.wire.worker import (
    plan_to_proto,
    result_from_proto,
    with_candidates,
    worker_info_from_proto,
)

MODEL = ModelInfo(id="m", max_model_len=64, vocab_size=100, eos_token_ids=(1,))


def ints(*values):
    return np.array(values, np.int32)


def make_news(entries=(), admitted=(), finished=()):
    """`entries` are (source, key, token, result index)."""
    columns = np.array(entries, np.int64).reshape(-1, 4).T
    return News(
        sources=columns[0].astype(np.int32),
        seq_keys=columns[1].astype(np.uint64),
        token_ids=columns[2].astype(np.int32),
        result_index=columns[3].astype(np.int32),
        admitted=tuple(admitted),
        finished=tuple(finished),
    )


def decode(output):
    return (
        unpack_uint64(output.seq_keys, "seq_keys").tolist(),
        unpack_int32(output.token_ids, "token_ids").tolist(),
    )


class TestNews:
    def test_one_message_for_each_source_in_order(self):
        news = make_news([(2, 7, 70, 0), (1, 5, 50, 1), (2, 6, 60, 2), (2, 7, 71, 3)])
        outputs = news_to_proto(9, news, ())
        assert {source: decode(output) for source, output in outputs.items()} == {
            1: ([5], [50]),
            2: ([7, 6, 7], [70, 60, 71]),
        }
        assert all(output.step_id == 9 for output in outputs.values())

    def test_nothing_new_is_no_message(self):
        assert news_to_proto(1, make_news(), ()) == {}

    def test_ends_and_admissions_alone_are_a_message(self):
        news = make_news(
            admitted=[Admitted(3, 1, num_cached_tokens=16, queue_s=0.5)],
            finished=[
                Finished(4, 2**64 - 1, FinishReason.STOP, stop_token_id=0),
                Finished(4, 2, FinishReason.ERROR, error="broken"),
            ],
        )
        outputs = news_to_proto(1, news, ())
        assert outputs[3].admitted[0] == scheduler_pb2.SequenceAdmitted(
            seq_key=1, num_cached_tokens=16, queue_s=0.5
        )
        stop, error = outputs[4].finished
        assert (stop.seq_key, stop.stop_token_id) == (2**64 - 1, 0)
        assert stop.HasField("stop_token_id")
        assert not stop.HasField("error")
        assert not error.HasField("stop_token_id")
        assert (error.error.code, error.error.message) == (13, "broken")

    def test_pins_alone_are_a_message(self):
        news = replace(make_news(), pinned=(Pinned(3, 1, 32), Pinned(3, 2, 0)))
        (output,) = news_to_proto(1, news, ()).values()
        pins = [(pinned.seq_key, pinned.num_pinned_tokens) for pinned in output.pinned]
        assert pins == [(1, 32), (2, 0)]
        merged = merge_step_outputs([output, scheduler_pb2.StepOutput(step_id=2)])
        assert list(merged.pinned) == list(output.pinned)

    def test_every_finish_reason_has_its_own_number(self):
        finished = [Finished(1, key, reason) for key, reason in enumerate(FinishReason)]
        (output,) = news_to_proto(1, make_news(finished=finished), ()).values()
        names = [common_pb2.FinishReason.Name(end.finish_reason) for end in output.finished]
        assert names == [f"FINISH_REASON_{reason.name}" for reason in FinishReason]

    def test_logprobs_follow_their_tokens_and_those_of_nobody_are_left_out(self):
        news = make_news([(1, 5, 50, 3), (2, 6, 60, 1), (1, 7, 70, 0)])
        logprobs = [
            worker_pb2.SampledLogprob(index=i, logprob=common_pb2.TokenLogprob(logprob=-i))
            for i in (0, 2, 3)
        ]
        outputs = news_to_proto(1, news, logprobs)
        assert {item.index: item.logprob.logprob for item in outputs[1].logprobs} == {0: -3, 1: 0}
        assert not outputs[2].logprobs


def test_plan_becomes_a_batch():
    sampling = common_pb2.SamplingParams(temperature=0.0, seed=5, logit_bias={3: 1.0})
    plan = StepPlan(
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
        num_scheduled_tokens=7,
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
    )


def test_result_becomes_an_outcome():
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
    assert result.outcome.step_id == 4
    assert result.outcome.sampled_rows.tolist() == [0, 3]
    assert result.outcome.sampled_token_ids.tolist() == [7, 8]
    assert result.outcome.stopped_rows.tolist() == [3]
    assert result.outcome.failed_rows.tolist() == [1]
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
    assert worker_info_from_proto(worker_pb2.WorkerInfo(model=model, **sizes)).num_blocks == 1
    with pytest.raises(InvalidArgumentError, match=f"{field} is 0"):
        worker_info_from_proto(worker_pb2.WorkerInfo(model=model, **(sizes | {field: 0})))


def test_worker_that_takes_kv_says_which_it_is():
    sizes = {"max_num_seqs": 1, "num_blocks": 1, "block_size": 1, "max_num_batched_tokens": 1}
    model = common_pb2.ModelInfo(max_model_len=1, vocab_size=1)
    message = worker_pb2.WorkerInfo(model=model, takes_kv=True, instance_id=2**64 - 1, **sizes)
    info = worker_info_from_proto(message)
    assert (info.takes_kv, info.instance_id) == (True, 2**64 - 1)
    message.instance_id = 0
    with pytest.raises(InvalidArgumentError, match="instance_id is 0"):
        worker_info_from_proto(message)


def test_request_keeps_all_it_was_sent_with():
    sampling = common_pb2.SamplingParams(seed=2**64 - 1, max_tokens=9, logit_bias={3: 1.0})
    request = request_from_proto(
        scheduler_pb2.Submit(
            request_id="r",
            first_seq_key=2**64 - 2,
            n=2,
            prompt_token_ids=pack_int32([0, 99]),
            sampling=sampling,
            cache_salt="s",
            traceparent="t",
            priority=-3,
            tenant="a",
            deadline_s=2.5,
            cache_pin_s=86400,
            outputs=[
                scheduler_pb2.OutputSoFar(token_ids=pack_int32([5])),
                scheduler_pb2.OutputSoFar(finished=True),
            ],
        ),
        source=3,
        model=MODEL,
        now=40.0,
    )
    assert (request.source, request.first_seq_key, request.request_id) == (3, 2**64 - 2, "r")
    assert request.prompt_token_ids.tolist() == [0, 99]
    assert (request.n, request.max_tokens) == (2, 9)
    assert common_pb2.SamplingParams.FromString(request.sampling) == sampling
    assert (request.cache_salt, request.traceparent) == ("s", "t")
    assert request.cache_pin_s == 86400.0
    assert (request.priority, request.tenant, request.deadline) == (-3, "a", 42.5)
    assert [(o.token_ids.tolist(), o.finished) for o in request.outputs] == [
        ([5], False),
        ([], True),
    ]


def beam_submit(n=2, sampling=(), outputs=(), **beam):
    params = {"seed": 1, "max_tokens": 9} | dict(sampling)
    return scheduler_pb2.Submit(
        n=n,
        prompt_token_ids=pack_int32([1]),
        sampling=common_pb2.SamplingParams(**params),
        beam=common_pb2.BeamSearch(**({"width": 4} | beam)),
        outputs=outputs,
    )


@pytest.mark.parametrize(
    ("sampling", "ends", "num_candidates"),
    [
        ({}, (1,), 8),
        ({"ignore_eos": True}, (), 8),
        ({"stop_token_ids": [7, 1, 3]}, (1, 3, 7), 16),
        ({"stop_token_ids": [7], "min_tokens": 2}, (1, 7), 12 + 2),
    ],
)
def test_a_search_asks_the_worker_for_candidates_and_ends_nothing(sampling, ends, num_candidates):
    submit = beam_submit(
        sampling=sampling, length_penalty=0.5, early_stopping=common_pb2.EARLY_STOPPING_NEVER
    )
    request = request_from_proto(submit, source=3, model=MODEL, now=0.0)
    assert request.beam == BeamParams(4, ends, 0.5, EarlyStopping.NEVER)
    assert request.min_tokens == sampling.get("min_tokens", 0)
    told = common_pb2.SamplingParams.FromString(request.sampling)
    assert told == common_pb2.SamplingParams(
        temperature=0.0, seed=1, ignore_eos=True, logprobs=num_candidates
    )


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"width": 1}, r"beam.width is 1; it must be in \[2, 10\]"),
        ({"width": 11}, r"beam.width is 11; it must be in \[2, 10\]"),
        ({"n": 5}, "n is 5; it must be at most beam.width, which is 4"),
        ({"length_penalty": 6}, r"beam.length_penalty is 6.0; it must be in \[-5, 5\]"),
        ({"length_penalty": float("nan")}, "beam.length_penalty is nan"),
        ({"early_stopping": 9}, "beam.early_stopping is 9"),
        (
            {"sampling": {"stop_token_ids": range(40)}},
            "looks at 164 at once; the model has 100",
        ),
        (
            {"outputs": [scheduler_pb2.OutputSoFar(finished=True), scheduler_pb2.OutputSoFar()]},
            "outputs has tokens or an end",
        ),
    ],
)
def test_what_makes_no_search_is_refused(fields, problem):
    with pytest.raises(InvalidArgumentError, match=problem):
        request_from_proto(beam_submit(**fields), source=3, model=MODEL, now=0.0)


def test_only_beams_have_candidates():
    result = result_from_proto(
        worker_pb2.StepResult(
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
        ),
        step_id_base=0,
        max_num_seqs=4,
    )
    assert with_candidates(result, frozenset()) is result.outcome
    outcome = with_candidates(result, frozenset({1, 2, 3}))
    assert outcome.candidate_rows.tolist() == [3, 2]
    assert outcome.candidate_counts.tolist() == [2, 0], "the worker said nothing of row 2"
    assert outcome.candidate_token_ids.tolist() == [10, 20]
    assert outcome.candidate_logprobs.tolist() == [-0.5, -1.5]


def test_what_a_search_found_goes_out_with_its_ends():
    news = make_news(
        [(4, 9, 90, 0)],
        finished=[
            Finished(4, 1, FinishReason.STOP, 8, token_ids=(7, 8), cumulative_logprob=-0.5),
            Finished(4, 2, FinishReason.LENGTH, token_ids=(7, 6, 5), cumulative_logprob=-0.75),
        ],
    )
    (output,) = news_to_proto(1, news, ()).values()
    assert decode(output) == ([9, 1, 1, 2, 2, 2], [90, 7, 8, 7, 6, 5])
    assert [end.cumulative_logprob for end in output.finished] == [-0.5, -0.75]


def test_keys_past_64_bits_are_refused():
    submit = scheduler_pb2.Submit(
        first_seq_key=2**64 - 2,
        n=3,
        prompt_token_ids=pack_int32([1]),
        sampling=common_pb2.SamplingParams(seed=1, max_tokens=9),
    )
    with pytest.raises(InvalidArgumentError, match=f"at most {2**64 - 3}"):
        request_from_proto(submit, source=3, model=MODEL, now=0.0)


def test_refusal_carries_code_and_hint():
    busy = refused_to_proto(5, TooBusyError("full", retry_after_s=2.0))
    assert (busy.first_seq_key, busy.code, busy.message, busy.retry_after_s) == (5, 8, "full", 2.0)
    assert not refused_to_proto(5, InvalidArgumentError("n", "is 0")).HasField("retry_after_s")


def test_large_keys_are_packed_whole():
    (output,) = news_to_proto(1, make_news([(1, 2**62, 1, 0)]), ()).values()
    assert output.seq_keys == pack_uint64([2**62])


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
    )
    NAMED = worker_pb2.HeldBlocks(block_ids=pack_int32([3, 1]), labels=b"a" * 32 + b"b" * 32)

    def test_parts_make_a_whole_that_can_be_recorded(self):
        other = worker_pb2.HeldBlocks(block_ids=pack_int32([0]), labels=b"c" * 32)
        parts = [
            worker_pb2.ReadHoldingsResponse(rows=[self.ROW], host=self.NAMED),
            worker_pb2.ReadHoldingsResponse(rows=[self.ROW], host=other),
        ]
        holdings = holdings_from_proto(parts)
        assert list(holdings.host.block_ids) == [3, 1, 0]
        assert list(holdings.host.hashes) == [b"a" * 32, b"b" * 32, b"c" * 32]
        assert len(holdings.rows) == 2
        check_holdings(holdings, self.INFO)
        assert holdings_to_proto(holdings_from_proto([holdings_to_proto(holdings)])) == (
            holdings_to_proto(holdings)
        )

    @pytest.mark.parametrize(
        ("field", "value", "problem"),
        [
            ("block_ids", pack_int32([8]), "rows.block_ids has 8"),
            ("block_ids", pack_int32([1, 1]), "rows.block_ids has a block twice"),
            ("block_ids", b"", "rows.num_computed_tokens is or has 2; the limit is 0"),
            ("num_computed_tokens", 3, "rows.num_computed_tokens is or has 3; the limit is 2"),
            ("token_ids", pack_int32([1, 100, 2]), "rows.token_ids has 100"),
            ("token_ids", pack_int32([1] * 17), "rows.token_ids is or has 17; the limit is 16"),
        ],
    )
    def test_a_row_that_cannot_be_is_refused(self, field, value, problem):
        row = worker_pb2.HeldRow()
        row.CopyFrom(self.ROW)
        setattr(row, field, value)
        holdings = holdings_from_proto([worker_pb2.ReadHoldingsResponse(rows=[row])])
        with pytest.raises(InvalidArgumentError, match=problem):
            check_holdings(holdings, self.INFO)

    def test_labels_that_are_not_parallel_are_refused(self):
        blocks = worker_pb2.HeldBlocks(block_ids=pack_int32([1]), labels=b"a" * 31)
        with pytest.raises(InvalidArgumentError, match=r"disk\.labels has 31 bytes"):
            holdings_from_proto([worker_pb2.ReadHoldingsResponse(disk=blocks)])

    def test_more_rows_or_blocks_than_there_are_are_refused(self):
        rows = holdings_from_proto([worker_pb2.ReadHoldingsResponse(rows=[self.ROW] * 3)])
        with pytest.raises(InvalidArgumentError, match=r"rows is or has 3; the limit is 2"):
            check_holdings(rows, self.INFO)
        disk = holdings_from_proto([worker_pb2.ReadHoldingsResponse(disk=self.NAMED)])
        with pytest.raises(InvalidArgumentError, match=r"disk\.block_ids has 3"):
            check_holdings(disk, self.INFO)
