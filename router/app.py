"""The router process: constructs all its parts from the settings and runs them."""

import asyncio
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import REGISTRY

from model_files.locate import find_model
from router.access.tenancy import check_operator
from router.gateway_metrics import GatewayMetrics
from router.grpc.api import inference_service
from router.grpc.authentication import KeyInterceptor
from router.grpc.bounds import RequestBounds
from router.grpc.operations import operator_services
from router.http import api as openai_api
from router.http.authentication import key_middleware
from router.http.batches.batches import Batches
from router.http.cross_origin import PageGuard, is_loopback
from router.kserve.api import kserve_service
from router.live.usage import UsageCounts
from router.operators.adapters_and_models import Operations
from router.operators.live_requests import LiveRequests
from router.operators.usage import UsageReports
from router.request.audit import AuditLog
from router.request.cells import Cells, join_health
from router.request.inference import Inference
from router.request.on_demand import OnDemand
from router.request.shared_admission import SharedAdmission
from router.schedulers.link import LinkConfig
from router.schedulers.pool import Schedulers
from router.settings import CellSettings, RouterSettings
from router.stored_turns.database import open_database
from router.stored_turns.store import TurnStore
from router.stored_turns.turns import Turns
from router.text.tokenizer import Tokenizers, load_tokenizer
from router.ui.api import Ui
from rpc.grpc_server import Service
from rpc.health import Health
from rpc.malloc import M_ARENA_MAX, keep_trimmed, set_malloc
from rpc.peers.discovery import Discovery
from rpc.security.operators import operators
from rpc.server import Addresses, serve
from rpc.tasks import SideTasks

_MIB = 1024 * 1024
_DAY_S = 86400


async def run_router(
    settings: RouterSettings,
    stop: asyncio.Event | None = None,
    on_started: Callable[[Addresses], Awaitable[None]] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`, then let live requests finish.

    `on_started` is called with the addresses at which the router listens. The router becomes ready
    later, when it has a scheduler. Raises ModelError if the model cannot be found, and
    FileNotFoundError or ValueError if its tokenizer cannot be read. If an error ends a
    background task, which is a bug, this error is raised, too.
    """
    # Several threads read, parse and tokenize large bodies. With an arena per thread, each arena
    # would keep the memory of the largest body, even after a trim (bench/worst_bodies.py).
    set_malloc(M_ARENA_MAX, 1)
    stop = asyncio.Event() if stop is None else stop
    health = Health()
    health.set_starting("reading the tokenizer")
    async with AsyncExitStack() as stack:  # closes in reverse order
        side_tasks = await stack.enter_async_context(SideTasks(stop))
        api_keys = settings.read_api_keys()
        usage = UsageCounts() if settings.turn_store else None
        shared = SharedAdmission(
            settings.max_live_requests, api_keys, usage, _open_audit(settings, stack)
        )
        cells, of_flags = await _open_cells(settings, shared, health)
        stack.callback(cells.close)
        side_tasks.run(keep_trimmed(), "malloc")
        gateway_metrics = GatewayMetrics(cells)
        health.before_scrape(gateway_metrics.refresh)
        REGISTRY.register(gateway_metrics)
        stack.callback(REGISTRY.unregister, gateway_metrics)
        turns = None if usage is None else _open_turns(settings, cells, usage)
        batches = None if turns is None else _make_batches(settings, cells, turns)
        ui = Ui(cells) if settings.ui else None
        check = None if api_keys is None else check_operator
        obeyed = operators(settings, check)
        reports = UsageReports(turns, obeyed)
        operations = Operations(cells, obeyed, settings.client_tls)
        http = web.Application(
            middlewares=[
                _page_middleware(settings)
                if api_keys is None
                else key_middleware(api_keys, frozenset() if ui is None else ui.open_paths)
            ]
        )
        http.add_routes(
            openai_api.routes(
                cells,
                operations,
                max_body_bytes=settings.max_body_mb * _MIB,
                may_be_compressed=settings.accept_compressed,
                turns=turns,
                batches=batches,
                usage=reports,
            )
        )
        if ui is not None:
            http.add_routes(ui.routes())
        services = [
            inference_service(cells),
            kserve_service(cells, lambda: health.ready),
            *operator_services(operations, LiveRequests(cells, obeyed), reports, cells, obeyed),
            *_engine_contracts(cells, health, settings, of_flags),
        ]
        for cell in cells.all:
            side_tasks.run(cell.schedulers.run(), f"schedulers of {cell.name}")
        if cells.on_demand is not None:
            side_tasks.run(cells.on_demand.run(), "models on demand")
        if turns is not None and batches is not None:
            stack.push_async_callback(turns.close)
            turn_tasks = await stack.enter_async_context(SideTasks(stop))
            turn_tasks.run(turns.run(), "turns")
            turn_tasks.run(batches.run(), "batches")

        async def drain() -> None:
            if turns is not None:
                await turns.drain()
            await cells.drain()

        await serve(
            settings,
            health=health,
            services=services,
            http=http,
            interceptors=[
                *([] if api_keys is None else [KeyInterceptor(api_keys)]),
                RequestBounds(cells, settings.max_body_mb * _MIB),
            ],
            # This limit is higher than those of `RequestBounds`, whose errors name the limit.
            max_received_mb=min(settings.max_message_mb, 4 * settings.max_body_mb),
            on_started=on_started,
            on_drain=drain,
            num_live=lambda: cells.num_live,
            check_operator=check,
            stop=stop,
            shared_http_port=settings.shared_http_port,
            grpc_by_grpcio=settings.grpc_server == "grpcio",
            accepts_compressed=settings.accept_compressed,
        )


def _open_audit(settings: RouterSettings, stack: AsyncExitStack) -> AuditLog | None:
    if settings.audit_log is None:
        return None
    audit = AuditLog(settings.audit_log, settings.audit_log_max_mb * _MIB, settings.audit_log_files)
    stack.push_async_callback(asyncio.to_thread, audit.close)
    return audit


async def _open_cells(
    settings: RouterSettings, shared: SharedAdmission, health: Health
) -> tuple[Cells, Path]:
    """Make the cells; also return the first model's directory."""
    own_health = [Health() for _ in settings.cells] if settings.cell else [health]
    made = [
        await _cell(settings, each, shared, own, health)
        for each, own in zip(settings.cells, own_health, strict=True)
    ]
    on_demand = None
    if settings.on_demand is not None or settings.idle_unload_s is not None:
        on_demand = OnDemand(
            [cell for cell, _ in made],
            max_loaded=settings.on_demand or len(made),
            min_loaded_s=settings.min_loaded_s,
            max_waiting=settings.max_live_requests,
            idle_unload_s=settings.idle_unload_s,
            tls=settings.client_tls,
        )
    cells = Cells([cell for cell, _ in made], shared, on_demand)
    if settings.cell:
        join_health([*zip(cells.names, own_health, strict=True)], health)
    return cells, made[0][1]


async def _cell(
    settings: RouterSettings,
    cell: CellSettings,
    shared: SharedAdmission,
    own: Health,
    router: Health,
) -> tuple[Inference, Path]:
    """Make the `Inference` of one cell; also return the model's directory.

    `own` is the health of the cell, and `router` is the health of the process.
    """
    directory = await asyncio.to_thread(
        find_model, cell.model, settings.cache_dir, router.set_starting, with_weights=False
    )
    first = await asyncio.to_thread(load_tokenizer, directory)
    tokenizers = Tokenizers(first, settings.cache_dir)
    schedulers = Schedulers(
        Discovery(cell.schedulers, interval_s=settings.discovery_interval_s),
        LinkConfig(
            router_id=f"{socket.gethostname()}:{os.getpid()}",
            max_message_mb=settings.max_message_mb,
            tls=settings.client_tls,
            model_name=cell.name,
        ),
        tokenizers=tokenizers,
        health=own,
    )
    inference = Inference(
        cell.name,
        tokenizers,
        schedulers,
        shared,
        tokenizer_threads=settings.tokenizer_threads,
        chats=settings.chats,
        stream_interval=settings.stream_interval,
    )
    return inference, directory


def _open_turns(settings: RouterSettings, cells: Cells, usage: UsageCounts) -> Turns:
    store = TurnStore(open_database(settings.turn_store), f"{socket.gethostname()}:{uuid.uuid4()}")
    return Turns(
        store,
        cells,
        usage,
        retention_s=settings.turn_retention_days * _DAY_S,
        usage_retention_s=settings.usage_retention_days * _DAY_S,
    )


def _make_batches(settings: RouterSettings, cells: Cells, turns: Turns) -> Batches:
    return Batches(cells, turns, settings.turn_retention_days * _DAY_S, settings.max_body_mb * _MIB)


def _engine_contracts(
    cells: Cells, health: Health, settings: RouterSettings, of_flags: Path
) -> Iterator[Service]:
    async def find_directory(directory: str) -> Path:
        if not directory:
            return of_flags
        return await asyncio.to_thread(
            find_model, directory, settings.cache_dir, with_weights=False
        )

    # These APIs are imported here, so that a router without them does not load them.
    if settings.vllm_engine:
        from router.vllm_engine.api import vllm_engine_service  # noqa: PLC0415

        yield vllm_engine_service(cells, health, find_directory)
    if settings.openengine:
        from router.openengine.api import openengine_services  # noqa: PLC0415

        yield from openengine_services(cells, health, find_directory)


def _page_middleware(settings: RouterSettings) -> Middleware:
    own = frozenset(map(str.lower, (settings.host, *settings.allowed_hosts)))
    guard = PageGuard(
        None if settings.server_tls is not None else own, frozenset(settings.allowed_origins)
    )
    # If the router listens beyond loopback, web pages may call everything except `OPERATOR_PATHS`.
    return guard.middleware(None if is_loopback(settings.host) else openai_api.OPERATOR_PATHS)
