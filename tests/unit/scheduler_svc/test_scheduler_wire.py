"""Conversion of a router's messages to requests, and of the core's events to messages."""

from dataclasses import replace

import numpy as np
import pytest

from contract.codec.packing import pack_int32, pack_uint64, unpack_int32, unpack_uint64
from contract.errors import (
    InvalidArgumentError,
    NotFoundError,
    QuireError,
    TooBusyError,
    UnimplementedError,
)
from contract.info import ModelInfo
from contract.lora import LoraAdapter
from contract.pooling import Abilities, Task
from contract.sampling import EarlyStopping
from quire.v1 import common_pb2, scheduler_pb2, worker_pb2
from scheduler_svc.core.interface.events import Admitted, Finished, Pinned, StepEvents
from scheduler_svc.core.interface.request import BeamParams, FinishReason
from scheduler_svc.wire.request import request_from_proto
from scheduler_svc.wire.router import (
    events_to_proto,
    merge_step_outputs,
    refused_to_proto,
    vectors_of,
)

MODEL = ModelInfo(id="m", max_model_len=64, vocab_size=100, eos_token_ids=(1,))


def ints(*values):
    return np.array(values, np.int32)


def make_news(entries=(), admitted=(), finished=()):
    """`entries` are (source, key, token, result index)."""
    columns = np.array(entries, np.int64).reshape(-1, 4).T
    return StepEvents(
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
        outputs = events_to_proto(9, news, ())
        assert {source: decode(output) for source, output in outputs.items()} == {
            1: ([5], [50]),
            2: ([7, 6, 7], [70, 60, 71]),
        }
        assert all(output.step_id == 9 for output in outputs.values())

    def test_nothing_new_is_no_message(self):
        assert events_to_proto(1, make_news(), ()) == {}

    def test_ends_and_admissions_alone_are_a_message(self):
        news = make_news(
            admitted=[Admitted(3, 1, num_cached_tokens=16, queue_s=0.5)],
            finished=[
                Finished(4, 2**64 - 1, FinishReason.STOP, stop_token_id=0),
                Finished(4, 2, FinishReason.ERROR, error="broken"),
            ],
        )
        outputs = events_to_proto(1, news, ())
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
        (output,) = events_to_proto(1, news, ()).values()
        pins = [(pinned.seq_key, pinned.num_pinned_tokens) for pinned in output.pinned]
        assert pins == [(1, 32), (2, 0)]
        merged = merge_step_outputs([output, scheduler_pb2.StepOutput(step_id=2)])
        assert list(merged.pinned) == list(output.pinned)

    def test_every_finish_reason_has_its_own_number(self):
        finished = [Finished(1, key, reason) for key, reason in enumerate(FinishReason)]
        (output,) = events_to_proto(1, make_news(finished=finished), ()).values()
        names = [common_pb2.FinishReason.Name(end.finish_reason) for end in output.finished]
        assert names == [f"FINISH_REASON_{reason.name}" for reason in FinishReason]

    def test_logprobs_follow_their_tokens_and_others_are_left_out(self):
        news = make_news([(1, 5, 50, 3), (2, 6, 60, 1), (1, 7, 70, 0)])
        logprobs = [
            worker_pb2.SampledLogprob(index=i, logprob=common_pb2.TokenLogprob(logprob=-i))
            for i in (0, 2, 3)
        ]
        outputs = events_to_proto(1, news, logprobs)
        assert {item.index: item.logprob.logprob for item in outputs[1].logprobs} == {0: -3, 1: 0}
        assert not outputs[2].logprobs


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


ADAPTERS = tuple(LoraAdapter(name, name.encode() * 32) for name in "ab")


def of_adapter(adapter, salt="", **fields):
    message = scheduler_pb2.Submit(
        n=1,
        prompt_token_ids=pack_int32([7]),
        sampling=common_pb2.SamplingParams(seed=1, max_tokens=9),
        cache_salt=salt,
        **fields,
    )
    if adapter is not None:
        message.sampling.adapter.name = adapter.name
        message.sampling.adapter.digest = adapter.digest
    model = replace(MODEL, adapters=ADAPTERS)
    return request_from_proto(message, source=3, model=model, now=0)


def test_each_adapter_has_prefixes_of_its_own():
    requests = [of_adapter(a, salt) for a in (None, *ADAPTERS) for salt in ("", "s")]
    salts = [request.cache_salt for request in requests]
    assert salts[:2] == ["", "s"]
    assert len(set(salts)) == len(salts)
    sampling = common_pb2.SamplingParams.FromString(requests[-1].sampling)
    assert (sampling.adapter.name, sampling.adapter.digest) == ("b", b"b" * 32)


def test_a_client_cannot_forge_an_adapters_salt():
    salt = of_adapter(ADAPTERS[0]).cache_salt
    with pytest.raises(InvalidArgumentError, match=r"cache_salt .* must not begin with U"):
        of_adapter(None, salt)


@pytest.mark.parametrize("name", ["a", "c"])
def test_an_adapter_that_the_workers_do_not_hold_is_not_found(name):
    with pytest.raises(NotFoundError, match=r"LoRA adapter '.' .* is not served; model 'm'"):
        of_adapter(LoraAdapter(name, bytes(32)))


def test_a_search_is_the_adapters():
    request = of_adapter(ADAPTERS[1], beam=common_pb2.BeamSearch(width=2))
    assert common_pb2.SamplingParams.FromString(request.sampling).adapter.name == "b"


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
        ({"n": 5}, "n is 5; it must be in \\[1, 4\\]"),
        ({"length_penalty": 6}, r"beam.length_penalty is 6.0; it must be in \[-5, 5\]"),
        ({"length_penalty": float("nan")}, "beam.length_penalty is nan"),
        ({"early_stopping": 9}, "beam.early_stopping is 9"),
        (
            {"sampling": {"stop_token_ids": range(40)}},
            "needs 164 tokens at once; the model has 100",
        ),
        (
            {"outputs": [scheduler_pb2.OutputSoFar(finished=True), scheduler_pb2.OutputSoFar()]},
            "outputs has tokens or an end",
        ),
    ],
)
def test_invalid_searches_are_refused(fields, problem):
    with pytest.raises(InvalidArgumentError, match=problem):
        request_from_proto(beam_submit(**fields), source=3, model=MODEL, now=0.0)


def test_a_searchs_outputs_are_sent_with_their_ends():
    news = make_news(
        [(4, 9, 90, 0)],
        finished=[
            Finished(4, 1, FinishReason.STOP, 8, token_ids=(7, 8), cumulative_logprob=-0.5),
            Finished(4, 2, FinishReason.LENGTH, token_ids=(7, 6, 5), cumulative_logprob=-0.75),
        ],
    )
    (output,) = events_to_proto(1, news, ()).values()
    assert decode(output) == ([9, 1, 1, 2, 2, 2], [90, 7, 8, 7, 6, 5])
    assert [end.cumulative_logprob for end in output.finished] == [-0.5, -0.75]


def test_vectors_go_to_their_sequences_with_the_other_events():
    rows = {3: (1, 30), 4: (2, 40)}
    pooled = [worker_pb2.PooledRow(row=row, vector=b"%04d" % row) for row in (3, 5, 4)]
    vectors = vectors_of(pooled, rows.get)  # the sequence of row 5 has ended
    outputs = events_to_proto(9, make_news([(1, 30, 0, 0)]), (), vectors)
    assert {
        source: [(each.seq_key, each.vector) for each in output.pooled]
        for source, output in outputs.items()
    } == {1: [(30, b"0003")], 2: [(40, b"0004")]}
    merged = merge_step_outputs([outputs[1], outputs[2]])
    assert [each.seq_key for each in merged.pooled] == [30, 40]


EMBEDS = replace(MODEL, abilities=Abilities((Task.GENERATE, Task.EMBED), embedding_size=8))


def to_pool(kind, model=EMBEDS, max_tokens=1, **fields):
    sampling = common_pb2.SamplingParams(seed=1, max_tokens=max_tokens)
    sampling.pooling.CopyFrom(common_pb2.Pooling(kind=kind, dimensions=fields.pop("dimensions", 0)))
    message = scheduler_pb2.Submit(
        n=1, prompt_token_ids=pack_int32([7]), sampling=sampling, **fields
    )
    return request_from_proto(message, source=3, model=model, now=0)


@pytest.mark.parametrize(
    ("kind", "reads"),
    [
        (common_pb2.POOLING_KIND_LAST, True),
        (common_pb2.POOLING_KIND_MEAN, False),
        (common_pb2.POOLING_KIND_CLS, False),
    ],
)
def test_only_the_last_state_may_follow_cached_tokens(kind, reads):
    request = to_pool(kind)
    assert request.pools
    assert request.reads_prefix_cache is reads


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"kind": common_pb2.POOLING_KIND_SCORE}, "model 'm' cannot score; it can generate, embed"),
        ({"kind": 99}, "pooling.kind is 99"),
        ({"dimensions": 9}, r"dimensions is 9; it must be in \[1, 8\]"),
        ({"model": MODEL}, "model 'm' cannot embed; it can generate"),
        ({"max_tokens": 2}, "is set with n = 1 and max_tokens = 2; both must be 1"),
        ({"resume_record": b"x"}, "with resume_record or beam it must not be"),
    ],
)
def test_what_cannot_be_pooled_is_refused(fields, problem):
    with pytest.raises(QuireError, match=problem):
        to_pool(**{"kind": common_pb2.POOLING_KIND_LAST} | fields)


def test_a_model_that_only_embeds_generates_nothing():
    model = replace(MODEL, abilities=Abilities((Task.EMBED,)))
    message = scheduler_pb2.Submit(
        n=1,
        prompt_token_ids=pack_int32([7]),
        sampling=common_pb2.SamplingParams(seed=1, max_tokens=1),
    )
    with pytest.raises(UnimplementedError, match="cannot generate; it can embed"):
        request_from_proto(message, source=3, model=model, now=0)


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
    (output,) = events_to_proto(1, make_news([(1, 2**62, 1, 0)]), ()).values()
    assert output.seq_keys == pack_uint64([2**62])
