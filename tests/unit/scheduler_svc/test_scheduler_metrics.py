"""The scheduler's metrics, logs and liveness for idle sessions."""

import asyncio
from types import SimpleNamespace

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from scheduler_requests import make_request

from contract.info import MemoryLevel
from rpc.health import Health
from scheduler_svc.core.compact.defragment import DefragmentationReport
from scheduler_svc.core.compact.fragmentation import Fragmentation, SpaceReport
from scheduler_svc.core.interface.config import SchedulerConfig, SchedulerLoad
from scheduler_svc.core.pacing import Pace
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.domain import DropSource, SubmitRequest
from scheduler_svc.observers import spans as telemetry
from scheduler_svc.observers.collectors import LoadCollector, SpaceCollector
from scheduler_svc.observers.metrics import SchedulerMetrics
from scheduler_svc.observers.shortage_log import SpaceWatch
from scheduler_svc.routers.fan_out import RouterStreams
from scheduler_svc.workers.fleet import Fleet
from scheduler_svc.workers.placement import Placer
from scheduler_svc.workers.session import Session


class FakeLink:
    """The link of an idle worker, which is never called."""

    lost = None
    info = SimpleNamespace(worker_id="w")


def make_session(spans):
    config = SchedulerConfig(
        num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32
    )
    return Session(
        FakeLink(),
        Scheduler(config),
        asyncio.Event(),
        streams=RouterStreams(1000),
        spans=spans,
        metrics=SchedulerMetrics(CollectorRegistry()).of("w"),
        pace=Pace(),
    )


def test_source_that_goes_right_after_a_request_leaves_no_span_behind():
    spans = telemetry.SequenceSpans()
    session = make_session(spans)
    session.post(SubmitRequest(make_request(source=3, traceparent="00-1-2-01")))
    session.post(DropSource(3))
    spans.drop_source(3)  # by the fleet, at once
    assert session.end() == ()
    assert not spans._traced


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
        memory_level=MemoryLevel.CRITICAL,
        num_memory_preemptions=1,
    )
    registry = CollectorRegistry()
    registry.register(LoadCollector(lambda: {"a:1": load, "b:1": None}, lambda: ["b:1"]))
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'quire_worker_attached{worker="a:1"} 1.0',
        'quire_worker_attached{worker="b:1"} 0.0',
        'quire_worker_model_unloaded{worker="a:1"} 0.0',
        'quire_worker_model_unloaded{worker="b:1"} 1.0',
        'quire_num_requests_running{worker="a:1"} 3.0',
        'quire_num_requests_waiting{worker="a:1"} 2.0',
        'quire_kv_cache_usage_perc{worker="a:1"} 0.25',
        'quire_prefix_cache_queries_total{worker="a:1"} 200.0',
        'quire_prefix_cache_hits_total{worker="a:1"} 48.0',
        'quire_num_preemptions_total{worker="a:1"} 1.0',
        'quire_memory_level{worker="a:1"} 2.0',
        'quire_memory_preemptions_total{worker="a:1"} 1.0',
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


def test_scattered_blocks_are_logged_once_and_defragmentation_too():
    scattered, mended = Fragmentation(8, 2), Fragmentation(8, 8)
    looked = DefragmentationReport(scattered, scattered, 0, has_moved=False)
    moved = DefragmentationReport(scattered, mended, 6, has_moved=True)
    watch = SpaceWatch("w")
    with structlog.testing.capture_logs() as logs:
        watch.on_reports([looked, looked])
        watch.on_reports([moved, looked])
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
