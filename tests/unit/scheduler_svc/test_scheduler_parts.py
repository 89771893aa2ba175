"""The scheduler's small parts: placement, holding, router streams, settings, spans, metrics."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from quire.v1 import common_pb2, scheduler_pb2
from rpc.errors import InvalidArgumentError, TooBusyError
from rpc.health import Health
from rpc.packing import pack_int32, pack_uint64
from rpc.settings import parse_settings
from scheduler_svc import telemetry
from scheduler_svc.core.beam_search import BeamParams
from scheduler_svc.core.config import SchedulerConfig, SchedulerLoad
from scheduler_svc.core.defragmenter import DefragmentationReport
from scheduler_svc.core.fragmentation import Fragmentation, SpaceReport
from scheduler_svc.core.plan import NewSequence, StepPlan
from scheduler_svc.core.request import FinishReason, OutputSoFar, Request
from scheduler_svc.core.successor import Successor
from scheduler_svc.domain import DropSource, SubmitRequest
from scheduler_svc.fleet import Fleet
from scheduler_svc.held_requests import HeldRequests
from scheduler_svc.metrics import LoadCollector, SchedulerMetrics
from scheduler_svc.placement import Placer
from scheduler_svc.progress import Progress, SequencesAtWorker
from scheduler_svc.router_stream import RouterStream
from scheduler_svc.router_streams import RouterStreams
from scheduler_svc.session import Session
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.space_metrics import SpaceCollector
from scheduler_svc.space_watch import SpaceWatch


def make_request(source=1, key=0, n=1, **changes):
    return Request(source, key, f"r{key}", np.array([1, 2], np.int32), n, 5, b"", **changes)


class FakeLink:
    """A worker that answers nothing, because it is asked nothing."""

    lost = None
    info = SimpleNamespace(worker_id="w")


def make_session(spans):
    config = SchedulerConfig(
        num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32
    )
    return Session(
        FakeLink(),
        Successor(config),
        wake=asyncio.Event(),
        streams=RouterStreams(1000),
        spans=spans,
        metrics=SchedulerMetrics(CollectorRegistry()).of("w"),
        max_decode_slowdown=1.5,
    )


def test_source_that_goes_right_after_a_request_leaves_no_span_behind():
    spans = telemetry.SequenceSpans()
    session = make_session(spans)
    session.post(SubmitRequest(make_request(source=3, traceparent="00-1-2-01")))
    session.post(DropSource(3))
    spans.drop_source(3)  # by the fleet, at once
    assert session.end() == ()
    assert not spans._traced


class TestProgress:
    @staticmethod
    def plan(*new_sequences, released=()):
        none = np.empty(0, np.int32)
        released = np.array(released, np.int32)
        return StepPlan(1, released, new_sequences, none, none, none, none, none, none, 0, 0)

    @staticmethod
    def sequence(row, known, sampling=b"s", output_index=0):
        tokens = np.array(known, np.int32)
        return NewSequence(1, row, tokens, 2, 0, tokens, sampling, output_index, 7, "")

    @staticmethod
    def request(*outputs, sampling=b"s"):
        so_far = tuple(
            OutputSoFar(np.array(tokens, np.int32), finished=False) for tokens in outputs
        )
        return replace(make_request(n=len(outputs), outputs=so_far), sampling=sampling)

    def test_one_without_a_row_has_waited(self):
        at_worker = SequencesAtWorker()
        at_worker.sent(self.plan(self.sequence(0, [1, 2]), self.sequence(1, [1, 3])))
        at_worker.sent(self.plan(released=[0]))
        assert at_worker.find(self.request([])) is Progress.WAITED
        at_worker.sent(self.plan(self.sequence(0, [1, 2], sampling=b"other")))
        assert at_worker.find(self.request([])) is Progress.WAITED

    def test_what_counts_is_what_it_gained_since_it_got_its_row(self):
        at_worker = SequencesAtWorker()
        at_worker.sent(self.plan(self.sequence(0, [1, 2, 8, 9])))
        assert at_worker.find(self.request([8, 9])) is Progress.NONE
        assert at_worker.find(self.request([8, 9, 7])) is Progress.SOME

    def test_one_output_that_gains_is_enough(self):
        at_worker = SequencesAtWorker()
        rows = self.sequence(0, [1, 2]), self.sequence(1, [1, 2], output_index=1)
        at_worker.sent(self.plan(*rows))
        assert at_worker.find(self.request([], [])) is Progress.NONE
        assert at_worker.find(self.request([], [5])) is Progress.SOME

    def test_a_search_gains_when_one_of_its_beams_is_longer_than_the_prompt(self):
        at_worker, request = SequencesAtWorker(), self.request([])
        request = replace(request, beam=BeamParams(2, ()))
        at_worker.sent(self.plan(self.sequence(0, [1, 2])))
        assert at_worker.find(request) is Progress.NONE
        at_worker.sent(self.plan(self.sequence(1, [1, 2, 5], output_index=1), released=[0]))
        assert at_worker.find(request) is Progress.SOME


class TestHolding:
    def test_requests_come_out_in_order(self):
        held = HeldRequests()
        commands = [SubmitRequest(make_request(key=key)) for key in (3, 1, 2)]
        for command in commands:
            held.add(command)
        assert held.num_seqs == 3
        assert held.take_all() == commands
        assert held.num_seqs == 0

    def test_cancel_ends_some_sequences_of_a_request(self):
        held = HeldRequests()
        held.add(SubmitRequest(make_request(key=10, n=3), was_accepted=True))
        finished = held.cancel(1, [11, 12, 99])
        assert [(end.seq_key, end.reason) for end in finished] == [
            (11, FinishReason.CANCELLED),
            (12, FinishReason.CANCELLED),
        ]
        (command,) = held.take_all()
        assert command.was_accepted
        assert [output.finished for output in command.request.outputs] == [False, True, True]

    def test_cancel_ends_a_search_as_a_whole(self):
        held = HeldRequests()
        held.add(SubmitRequest(make_request(key=10, n=2, beam=BeamParams(3, ()))))
        assert [end.seq_key for end in held.cancel(1, [11])] == [10, 11]
        assert held.take_all() == []

    def test_cancelled_sequence_does_not_end_again(self):
        held = HeldRequests()
        held.add(SubmitRequest(make_request(key=10, n=2)))
        held.cancel(1, [10])
        assert held.cancel(1, [10]) == ()
        assert held.num_seqs == 1

    def test_request_without_live_sequences_is_forgotten(self):
        held = HeldRequests()
        held.add(SubmitRequest(make_request(key=10)))
        held.cancel(1, [10])
        assert held.take_all() == []

    def test_same_key_of_another_source_is_left_alone(self):
        held = HeldRequests()
        held.add(SubmitRequest(make_request(source=2, key=10)))
        assert held.cancel(1, [10]) == ()
        held.drop_source(1)
        assert held.num_seqs == 1
        held.drop_source(2)
        assert held.num_seqs == 0


def make_output(step_id, keys, tokens, **fields):
    return scheduler_pb2.StepOutput(
        step_id=step_id, seq_keys=pack_uint64(keys), token_ids=pack_int32(tokens), **fields
    )


def make_logprob(index, logprob):
    return scheduler_pb2.IndexedLogprob(
        index=index, logprob=common_pb2.TokenLogprob(logprob=logprob)
    )


class TestRouterStream:
    async def test_pending_outputs_become_one_message(self):
        stream = RouterStream(1, "r", 1 << 20)
        stream.deliver(make_output(4, [1, 2], [10, 20], logprobs=[make_logprob(1, -2.0)]))
        stream.deliver(make_output(5, [2, 1], [21, 11], logprobs=[make_logprob(0, -3.0)]))
        end = scheduler_pb2.SequenceFinished(seq_key=1)
        stream.deliver(make_output(6, [], [], finished=[end]))
        message = await stream.next_message()
        assert message.step == make_output(
            6,
            [1, 2, 2, 1],
            [10, 20, 21, 11],
            logprobs=[make_logprob(1, -2.0), make_logprob(2, -3.0)],
            finished=[end],
        )

    async def test_what_is_pending_comes_before_the_end(self):
        stream = RouterStream(1, "r", 1 << 20)
        stream.deliver(make_output(1, [1], [10]))
        stream.refuse(scheduler_pb2.Refused(first_seq_key=9))
        stream.end()
        assert (await stream.next_message()).refused.first_seq_key == 9
        assert (await stream.next_message()).step.step_id == 1
        assert await stream.next_message() is None

    async def test_waiting_ends_when_something_comes(self):
        stream = RouterStream(1, "r", 1 << 20)
        waiting = asyncio.create_task(stream.next_message())
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.deliver(make_output(1, [1], [10]))
        assert (await waiting).step.step_id == 1

    @pytest.mark.parametrize("num_bytes", [0, 4000])
    async def test_backlog_is_bounded_whatever_it_is_made_of(self, num_bytes):
        stream = RouterStream(1, "r", 100_000)
        num_delivered = 0
        while not stream._ended:
            stream.deliver(make_output(1, [], [0] * (num_bytes // 4)))
            num_delivered += 1
        assert num_delivered <= 100_000 // (num_bytes + 256) + 1
        assert not stream._outputs
        with pytest.raises(TooBusyError, match="100000 bytes"):
            await stream.next_message()

    async def test_backlog_is_what_has_not_been_sent(self):
        stream = RouterStream(1, "r", 1000)
        for step_id in range(20):
            stream.deliver(make_output(step_id, [1], [2]))
            assert (await stream.next_message()).step.step_id == step_id

    def test_live_key_cannot_be_claimed_twice(self):
        streams = RouterStreams(1 << 20)
        stream = streams.open("r")
        stream.claim([10, 11, 12])
        with pytest.raises(InvalidArgumentError, match="sequence 12 is live"):
            stream.claim([12])
        stream.claim([13])
        streams.refuse(make_request(stream.source, key=13), TooBusyError("full"))
        stream.claim([13])

    def test_news_for_a_stream_that_is_gone_is_lost(self):
        streams = RouterStreams(1 << 20)
        stream = streams.open("r")
        streams.close(stream)
        streams.deliver({stream.source: make_output(1, [1], [2])})
        streams.refuse(make_request(stream.source), TooBusyError("full"))
        assert streams.open("r").source != stream.source


class TestSettings:
    @pytest.mark.parametrize(
        "argv", [["--workers", "a:1,unix:/b"], ["--workers", "a:1", "--workers", "unix:/b"]]
    )
    def test_workers_are_listed_by_commas_or_one_by_one(self, argv):
        assert parse_settings(SchedulerSettings, "q", argv).workers == ("a:1", "unix:/b")

    def test_workers_come_from_the_environment(self, monkeypatch):
        monkeypatch.setenv("QUIRE_WORKERS", "a:1,b:2")
        assert parse_settings(SchedulerSettings, "q", []).workers == ("a:1", "b:2")

    @pytest.mark.parametrize(
        ("argv", "problem"),
        [
            (["--workers", "a:1,a:1"], "a:1 twice"),
            (["--workers", ","], "names none"),
            (["--max-waiting", "0"], "--max-waiting: 0"),
            (["--watermark", "1"], "--watermark: 1"),
            (["--epoch", "0"], "--epoch: 0"),
            (["--max-prefill-chunk", "0"], "--max-prefill-chunk: 0"),
            (["--step-timeout-s", "0"], "--step-timeout-s: 0"),
        ],
    )
    def test_wrong_value_is_named(self, argv, problem, capsys):
        with pytest.raises(SystemExit) as caught:
            parse_settings(SchedulerSettings, "q", argv)
        assert caught.value.code == 2
        assert problem in capsys.readouterr().err


def test_metrics_show_each_attached_workers_load():
    load = SchedulerLoad(
        num_running=3,
        num_waiting=2,
        num_swapped=1,
        max_num_seqs=8,
        num_blocks=100,
        num_free_blocks=50,
        num_cached_blocks=25,
        num_pinned_blocks=4,
        block_size=16,
        num_preemptions=1,
        prefix_cache_queries=200,
        prefix_cache_hits=48,
        num_steps=7,
        num_recomputed_tokens=9,
        num_adopted_tokens=0,
        num_host_blocks=40,
        num_free_host_blocks=30,
        num_cached_host_blocks=6,
        num_swapped_out_blocks=20,
        num_swapped_in_blocks=12,
        num_demoted_blocks=11,
        num_promoted_blocks=10,
        num_moved_blocks=14,
        num_defragmentations=2,
        num_disk_blocks=60,
        num_free_disk_blocks=35,
        num_cached_disk_blocks=17,
        num_stored_blocks=26,
        num_loaded_blocks=19,
        num_failed_disk_moves=2,
        num_spilled_blocks=5,
    )
    registry = CollectorRegistry()
    registry.register(LoadCollector(lambda: {"a:1": load, "b:1": None}))
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'quire_worker_attached{worker="a:1"} 1.0',
        'quire_worker_attached{worker="b:1"} 0.0',
        'quire_num_requests_running{worker="a:1"} 3.0',
        'quire_num_requests_waiting{worker="a:1"} 2.0',
        'quire_kv_cache_usage_perc{worker="a:1"} 0.25',
        'quire_prefix_cache_queries_total{worker="a:1"} 200.0',
        'quire_prefix_cache_hits_total{worker="a:1"} 48.0',
        'quire_num_preemptions_total{worker="a:1"} 1.0',
        'quire_num_requests_swapped{worker="a:1"} 1.0',
        'quire_recomputed_tokens_total{worker="a:1"} 9.0',
        'quire_kv_host_blocks{worker="a:1"} 40.0',
        'quire_kv_free_host_blocks{worker="a:1"} 30.0',
        'quire_kv_cached_host_blocks{worker="a:1"} 6.0',
        'quire_kv_swapped_out_blocks_total{worker="a:1"} 20.0',
        'quire_kv_swapped_in_blocks_total{worker="a:1"} 12.0',
        'quire_kv_demoted_blocks_total{worker="a:1"} 11.0',
        'quire_kv_promoted_blocks_total{worker="a:1"} 10.0',
        'quire_kv_pinned_blocks{worker="a:1"} 4.0',
        'quire_kv_moved_blocks_total{worker="a:1"} 14.0',
        'quire_kv_defragmentations_total{worker="a:1"} 2.0',
        'quire_kv_disk_blocks{worker="a:1"} 60.0',
        'quire_kv_free_disk_blocks{worker="a:1"} 35.0',
        'quire_kv_cached_disk_blocks{worker="a:1"} 17.0',
        'quire_kv_stored_blocks_total{worker="a:1"} 26.0',
        'quire_kv_loaded_blocks_total{worker="a:1"} 19.0',
        'quire_kv_failed_disk_moves_total{worker="a:1"} 2.0',
        'quire_kv_spilled_blocks_total{worker="a:1"} 5.0',
    ):
        assert line in lines
    assert not any('running{worker="b:1"}' in line for line in lines)


def test_metrics_show_how_well_each_attached_workers_space_is_used():
    space = SpaceReport(Fragmentation(8, 2), Fragmentation(10, 8), 40, 30)
    registry = CollectorRegistry()
    registry.register(SpaceCollector(lambda: {"a:1": space}))
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'quire_kv_fragmentation_rate{tier="device",worker="a:1"} 0.75',
        'quire_kv_longest_free_run_blocks{tier="device",worker="a:1"} 2.0',
        'quire_kv_fragmentation_level{tier="device",worker="a:1"} 2.0',
        'quire_kv_fragmentation_level{tier="host",worker="a:1"} 1.0',
        'quire_kv_token_occupancy{worker="a:1"} 0.75',
    ):
        assert line in lines


def test_scattered_blocks_are_warned_of_once_and_defragmentation_is_told():
    scattered, mended = Fragmentation(8, 2), Fragmentation(8, 8)
    looked = DefragmentationReport(scattered, scattered, 0, has_moved=False)
    moved = DefragmentationReport(scattered, mended, 6, has_moved=True)
    watch = SpaceWatch("w")
    with structlog.testing.capture_logs() as logs:
        watch.hear([looked, looked])
        watch.hear([moved, looked])
    events = [(line["log_level"], line["event"]) for line in logs]
    warning = ("warning", "free blocks are scattered")
    assert events == [warning, ("info", "blocks were defragmented"), warning]
    assert (logs[1]["rate_before"], logs[1]["rate_after"]) == (0.75, 0.0)
    assert logs[1]["num_moved_blocks"] == 6


@pytest.mark.parametrize(("age_s", "is_stalled"), [(0.0, False), (60.0, False), (66.0, True)])
def test_step_that_nobody_gives_up_is_a_liveness_failure(age_s, is_stalled):
    fleet = Fleet(
        streams=RouterStreams(1 << 20),
        spans=telemetry.SequenceSpans(),
        health=Health(),
        max_waiting=1,
        step_timeout_s=60.0,
        placer=Placer(),
    )
    session = SimpleNamespace(oldest_step_age_s=lambda: age_s)
    fleet.roster.add(SimpleNamespace(target="a:1", session=None))
    fleet.roster.add(SimpleNamespace(target="b:1", session=session))
    problem = fleet.describe_stall()
    assert (problem is not None) == is_stalled
    assert not is_stalled or "b:1" in problem
