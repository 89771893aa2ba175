"""The scheduler process: constructs all its parts and runs them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry

from contract.info import WorkerInfo
from contract.liveness.epoch import epoch_after
from rpc.grpc_server import Service
from rpc.health import Health
from rpc.peers.discovery import Discovery, Resolver
from rpc.server import Addresses, before_serving, serve
from rpc.tasks import SideTasks
from scheduler_svc.core.interface.config import Eviction, PreemptionMode, SchedulerConfig
from scheduler_svc.core.pacing import Pace
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal.record import Recordings
from scheduler_svc.observers.collectors import LoadCollector, QueueCollector, SpaceCollector
from scheduler_svc.observers.metrics import SchedulerMetrics
from scheduler_svc.observers.spans import SequenceSpans
from scheduler_svc.operations.kept_state import StateFile, accounts_of, restore_pools
from scheduler_svc.operations.loading import Loading, WorkerCalls
from scheduler_svc.operations.migration import Drainer, Migrator
from scheduler_svc.operations.prefill_handoff import Handoff
from scheduler_svc.operations.resizing import Resizer
from scheduler_svc.operations.services import adapter_service, loading_service
from scheduler_svc.routers.fan_out import QueueRoomReporter, RouterStreams
from scheduler_svc.routers.resumable import ResumableRequests
from scheduler_svc.service import SchedulerServicer, scheduler_service
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.workers.attach import attach, newest_epoch
from scheduler_svc.workers.engine import Engine, OpenCore
from scheduler_svc.workers.fleet import Fleet
from scheduler_svc.workers.kv.far_tier import FarTier
from scheduler_svc.workers.kv.prefix_pulls import PrefixPulls
from scheduler_svc.workers.link import WorkerClientConfig
from scheduler_svc.workers.placement import PlacementMethod, Placer
from scheduler_svc.workers.session import Session
from scheduler_svc.workers.standby import wait_for_vacancy

if TYPE_CHECKING:
    from scheduler_svc.kv_events.feed import KvEvents
    from scheduler_svc.lease import Lease

_MIB = 1024 * 1024


async def run_scheduler(
    settings: SchedulerSettings,
    *,
    registry: CollectorRegistry = REGISTRY,
    on_started: Callable[[Addresses], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
    resolver: Resolver | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`, then drain.

    `resolver` looks up the workers' host names; None: the system's resolver.

    Raises:
        StaleEpochError: A newer scheduler has taken over the workers.
        RecordingError: The recording cannot be written.
    """
    workers = Discovery(
        settings.workers, resolver=resolver, interval_s=settings.discovery_interval_s
    )
    stop = stop if stop is not None else asyncio.Event()
    async with AsyncExitStack() as stack:
        lease = None
        if settings.lease:
            lease = await stack.enter_async_context(_open_lease(settings))
        newest = await _wait_for_turn(settings, workers, lease, stop)
        if newest is None:
            return
        epoch = settings.epoch or epoch_after(newest)
        recordings = None
        if settings.record is not None:
            recordings = stack.enter_context(
                Recordings(settings.record, settings.record_max_mb * _MIB, epoch)
            )
        await _run_scheduler(
            settings, workers, epoch, lease, recordings, registry, on_started, stop
        )


async def _wait_for_turn(
    settings: SchedulerSettings, workers: Discovery, lease: "Lease | None", stop: asyncio.Event
) -> int | None:
    """Wait until this scheduler may serve; return the newest epoch that a worker has seen.

    Return None if the process is told to stop while it waits.
    """
    if not settings.standby:
        return await newest_epoch(workers, settings.client_tls)
    health = Health()
    health.set_ready("it stands by")
    silence_s, tls = settings.standby_silence_s, settings.client_tls
    return await before_serving(
        settings,
        lambda: wait_for_vacancy(workers, settings.standby_s, silence_s, tls, lease),
        stop=stop,
        probes=health if settings.standby_http else None,
    )


async def _run_scheduler(
    settings: SchedulerSettings,
    workers: Discovery,
    epoch: int,
    lease: "Lease | None",
    recordings: Recordings | None,
    registry: CollectorRegistry,
    on_started: Callable[[Addresses], Awaitable[None]] | None,
    stop: asyncio.Event,
) -> None:
    state = StateFile(settings.state_file)
    health = Health()
    resumables = ResumableRequests(
        grace_s=settings.resume_grace_s, max_bytes=settings.resume_max_mb * _MIB
    )
    streams = RouterStreams(settings.max_backlog_mb * _MIB, resumables)
    spans = SequenceSpans()
    metrics = SchedulerMetrics(registry)
    pulls = PrefixPulls() if settings.pull_prefixes else None
    far = FarTier()
    fleet = Fleet(
        streams=streams,
        spans=spans,
        health=health,
        max_waiting=settings.max_waiting,
        step_timeout_s=settings.step_timeout_s,
        placer=Placer(PlacementMethod(settings.placement)),
        pulls=pulls,
        far=far,
        kept_adapters=state.adapters,
        keep_adapters=state.keep_adapters,
    )
    roster = fleet.roster
    migrator = Migrator(roster, metrics.migrations)
    handoff = Handoff(roster, migrator)
    pace = Pace(settings.max_decode_slowdown, settings.max_prompt_step_s)

    kv_events, kv_event_service = _open_kv_events(epoch) if settings.kv_events else (None, None)

    open_core: OpenCore = partial(_open_core, settings, recordings, state)

    def make_engine(target: str) -> Engine:
        return Engine(
            target,
            attach=partial(attach, _client_config(settings, target, epoch, streams)),
            open_core=open_core if kv_events is None else kv_events.watched(target, open_core),
            make_session=partial(
                Session,
                streams=streams,
                spans=spans,
                metrics=metrics.of(target),
                pace=pace,
                on_admitted=far.on_admitted,
            ),
            owner=fleet,
        )

    _register_collectors(registry, fleet)
    health.add_liveness("steps", fleet.describe_stall)
    queue_room = QueueRoomReporter(
        lambda: fleet.queue_room, streams.publish_room, settings.max_waiting
    )
    resizer = Resizer(roster, state.keep_pool)
    drainer = Drainer(fleet, migrator)
    calls = WorkerCalls(epoch, settings.client_tls)
    loading = Loading(roster, drainer, calls, on_stay=fleet.place_unplaced)
    servicer = SchedulerServicer(fleet, streams, migrator, resizer, queue_room, epoch)
    side_tasks = SideTasks(stop)
    services = [
        scheduler_service(servicer),
        adapter_service(fleet.adapters, state.written),
        loading_service(loading),
    ]
    if kv_event_service is not None:
        services.append(kv_event_service)

    async def start(addresses: Addresses) -> None:
        # Start only after the ports are bound, because attaching takes the workers from another
        # scheduler.
        side_tasks.run(fleet.run(workers, make_engine, metrics.forget), "engines")
        side_tasks.run(servicer.expire_resumable(), "resumable requests")
        side_tasks.run(fleet.watch(), "hanging workers")
        side_tasks.run(state.run(lambda: accounts_of(roster)), "state file")
        side_tasks.run(restore_pools(state, roster, resizer), "sizes of pools")
        side_tasks.run(servicer.send_heartbeats(), "heartbeats")
        side_tasks.run(streams.watch(), "silent routers")
        side_tasks.run(queue_room.run(), "room in the queues")
        if lease is not None:
            side_tasks.run(lease.keep(), "lease")
        if kv_events is not None and settings.kv_events_zmq:
            side_tasks.run(_publish_kv_events(kv_events, settings), "KV events over ZeroMQ")
        if settings.rebalance and (len(settings.workers) > 1 or not workers.is_static):
            side_tasks.run(migrator.rebalance(), "rebalancing")
        side_tasks.run(drainer.run(), "draining workers")
        side_tasks.run(handoff.run(), "moves from prefill to decode workers")
        if on_started is not None:
            await on_started(addresses)

    async with side_tasks:
        try:
            await serve(
                settings,
                health=health,
                services=services,
                on_started=start,
                on_drain=fleet.drain,
                num_live=lambda: fleet.num_live_seqs,
                drain_worker=loading.drain_worker,
                stop=stop,
            )
        finally:
            if pulls is not None:
                pulls.stop()
            far.stop()
            handoff.stop()
            migrator.stop()
            resizer.stop()
            loading.stop()
            fleet.adapters.stop()


def _client_config(
    settings: SchedulerSettings, target: str, epoch: int, streams: RouterStreams
) -> WorkerClientConfig:
    return WorkerClientConfig(
        target=target,
        epoch=epoch,
        scheduler_id=settings.scheduler_id,
        step_timeout_s=settings.step_timeout_s,
        max_message_mb=settings.max_message_mb,
        tls=settings.client_tls,
        lost_after_s=settings.worker_silence_s,
        is_cut_off=lambda: streams.are_silent,
    )


def _register_collectors(registry: CollectorRegistry, fleet: Fleet) -> None:
    roster = fleet.roster
    registry.register(LoadCollector(roster.loads, roster.unloaded))
    registry.register(SpaceCollector(roster.spaces))
    registry.register(
        QueueCollector(
            roster.queued_by_tenant, roster.oldest_step_ages_s, lambda: fleet.num_unplaced_seqs
        )
    )


def _open_kv_events(epoch: int) -> "tuple[KvEvents, Service]":
    from scheduler_svc.kv_events.feed import KvEvents  # noqa: PLC0415 - only what is used is loaded
    from scheduler_svc.kv_events.service import kv_event_service  # noqa: PLC0415

    events = KvEvents(epoch)
    return events, kv_event_service(events)


def _open_lease(settings: SchedulerSettings) -> "Lease":
    from scheduler_svc.lease import Lease  # noqa: PLC0415 - only what is used is loaded

    return Lease(settings.lease, settings.scheduler_id)


async def _publish_kv_events(events: "KvEvents", settings: SchedulerSettings) -> None:
    from scheduler_svc.kv_events.zmq_outlet import ZmqOutlet  # noqa: PLC0415 - an extra

    outlet = ZmqOutlet(
        events, settings.kv_events_zmq, settings.kv_events_replay, settings.kv_events_topic
    )
    await outlet.run()


@contextmanager
def _open_core(
    settings: SchedulerSettings, recordings: Recordings | None, state: StateFile, info: WorkerInfo
) -> Iterator[Scheduler]:
    config = _configure_core(settings, info)
    opened = (
        nullcontext(Scheduler(config)) if recordings is None else recordings.open_core(info, config)
    )
    with opened as core:
        if accounts := state.accounts_of(info.worker_id):
            core.restore_accounts(accounts.items())
        yield core


def _configure_core(settings: SchedulerSettings, info: WorkerInfo) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=info.limits.num_blocks,
        block_size=info.limits.block_size,
        kv_windows=info.limits.kv_windows,
        max_num_seqs=info.limits.max_num_seqs,
        max_num_batched_tokens=info.limits.max_num_batched_tokens,
        max_model_len=info.limits.max_model_len,
        num_saturating_tokens=info.limits.num_saturating_tokens,
        min_prompt_tokens=info.limits.min_prompt_tokens,
        num_draft_tokens=info.num_draft_tokens,
        max_num_blocks=info.max_num_blocks,
        min_num_blocks=info.min_num_blocks,
        max_waiting=settings.max_waiting,
        enable_prefix_caching=settings.enable_prefix_caching and not info.takes_whole_prompts,
        watermark=settings.watermark,
        eviction=Eviction(settings.eviction),
        max_pinned_share=settings.max_pinned_share,
        max_tenant_pinned_share=settings.max_tenant_pinned_share,
        defragment_interval_s=settings.defragment_interval_s,
        defragment_threshold=settings.defragment_threshold,
        max_defragment_moves=settings.max_defragment_moves,
        max_prefill_chunk=settings.max_prefill_chunk,
        num_host_blocks=info.limits.num_host_blocks,
        host_is_device_memory=info.host_is_device_memory,
        bytes_per_block=info.block_bytes,
        swap_bytes_per_s=info.swap_bytes_per_s,
        prefill_tokens_per_s=info.prefill_tokens_per_s,
        num_disk_blocks=info.limits.num_disk_blocks,
        disk_bytes_per_s=info.disk_bytes_per_s,
        max_disk_moves=settings.max_disk_moves,
        claim_s=settings.claim_s,
        preemption_mode=PreemptionMode(settings.preemption_mode),
        max_swap_blocks=settings.max_swap_blocks,
        long_prefill_threshold=settings.long_prefill_threshold,
        max_long_prefills=settings.max_long_prefills,
        takes_whole_prompts=info.takes_whole_prompts,
        policy=settings.policy,
        policy_args=settings.policy_args,
    )
