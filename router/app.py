"""The router process: constructs all its parts from the settings and runs them."""

import asyncio
import contextlib
import os
import socket
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import REGISTRY

from model_files.locate import find_model
from router.access.authentication import KeyInterceptor, key_middleware
from router.access.tenancy import check_operator
from router.gateway_metrics import GatewayMetrics
from router.grpc.api import inference_service
from router.grpc.bounds import RequestBounds
from router.grpc.operations import operator_services
from router.http import api as openai_api
from router.http.batches.batches import Batches
from router.http.web_pages import PageGuard, is_loopback
from router.kserve.api import kserve_service
from router.operators.adapters_and_models import Operations
from router.operators.live_requests import LiveRequests
from router.operators.usage import UsageReports
from router.request.audit import AuditLog
from router.request.inference import Inference
from router.request.usage import UsageCounts
from router.schedulers.link import LinkConfig
from router.schedulers.pool import Schedulers
from router.settings import RouterSettings
from router.text.tokenizer import Tokenizers, load_tokenizer
from router.turns.database import open_database
from router.turns.store import TurnStore
from router.turns.turns import Turns
from router.ui.api import Ui
from rpc.grpc_server import Service
from rpc.health import Health
from rpc.malloc import M_ARENA_MAX, keep_trimmed, set_malloc
from rpc.peers.discovery import Discovery
from rpc.security.operators import operators
from rpc.server import Addresses, serve

_MIB = 1024 * 1024
_DAY_S = 86400


async def run_router(
    settings: RouterSettings,
    stop: asyncio.Event | None = None,
    on_started: Callable[[Addresses], Awaitable[None]] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; live requests finish first.

    `on_started` gets the addresses; the router is ready once it has a scheduler. Raises ModelError
    if the model cannot be found, FileNotFoundError or ValueError if its tokenizer cannot be read,
    and any error that ends the scheduler client, which is a bug.
    """
    # Several threads read, parse and tokenize a large body. Each one's arena would keep what the
    # largest body took, even when it is trimmed (bench/worst_bodies.py).
    set_malloc(M_ARENA_MAX, 1)
    stop = asyncio.Event() if stop is None else stop
    health = Health()
    health.set_starting("reading the tokenizer")
    directory = await asyncio.to_thread(
        find_model,
        settings.model,
        settings.cache_dir,
        health.set_starting,
        with_weights=False,
    )
    first = await asyncio.to_thread(load_tokenizer, directory)
    tokenizers = Tokenizers(first, settings.cache_dir)
    schedulers = Schedulers(
        Discovery(settings.scheduler, interval_s=settings.discovery_interval_s),
        LinkConfig(
            router_id=f"{socket.gethostname()}:{os.getpid()}",
            max_message_mb=settings.max_message_mb,
            tls=settings.client_tls,
        ),
        tokenizers=tokenizers,
        health=health,
    )
    api_keys = settings.read_api_keys()
    usage = UsageCounts() if settings.turn_store else None
    audit = None
    if settings.audit_log is not None:
        audit = AuditLog(
            settings.audit_log, settings.audit_log_max_mb * _MIB, settings.audit_log_files
        )
    inference = Inference(
        settings.model_name,
        tokenizers,
        schedulers,
        max_live_requests=settings.max_live_requests,
        tokenizer_threads=settings.tokenizer_threads,
        chats=settings.chats,
        api_keys=api_keys,
        usage=usage,
        audit=audit,
    )
    gateway_metrics = GatewayMetrics(inference)
    health.before_scrape(gateway_metrics.refresh)
    ui = Ui(inference) if settings.ui else None
    turns = None if usage is None else _turns(settings, inference, usage)
    batches = (
        None if turns is None else Batches(inference, turns, settings.turn_retention_days * _DAY_S)
    )
    open_paths = frozenset() if ui is None else ui.open_paths
    access = (
        _page_middleware(settings) if api_keys is None else key_middleware(api_keys, open_paths)
    )
    http = web.Application(middlewares=[access])
    check = None if api_keys is None else check_operator
    obeyed = operators(settings, check)
    reports = UsageReports(turns, obeyed)
    operations = Operations(schedulers, inference.model, obeyed, settings.client_tls)
    http.add_routes(
        openai_api.routes(
            inference,
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
    writer = None if turns is None else asyncio.create_task(turns.run(), name="turns")
    keeper = None if batches is None else asyncio.create_task(batches.run(), name="batches")
    if keeper is not None:
        keeper.add_done_callback(lambda _: stop.set())
    if writer is not None:
        writer.add_done_callback(lambda _: stop.set())  # it ends by itself only after a bug
    services = [
        inference_service(inference),
        kserve_service(inference, lambda: health.ready),
        *operator_services(operations, LiveRequests(inference, obeyed), reports, inference, obeyed),
    ]
    if settings.vllm_engine:
        services.append(_vllm_engine(inference, health, settings, directory))
    client = asyncio.create_task(schedulers.run(), name="schedulers")
    client.add_done_callback(lambda _: stop.set())  # it ends by itself only after a bug
    trimming = asyncio.create_task(keep_trimmed(), name="malloc")
    REGISTRY.register(gateway_metrics)

    async def drain() -> None:
        if turns is not None:
            await turns.drain()
        await inference.drain()

    try:
        await serve(
            settings,
            health=health,
            services=services,
            http=http,
            interceptors=[
                *([] if api_keys is None else [KeyInterceptor(api_keys)]),
                RequestBounds(inference, settings.max_body_mb * _MIB),
            ],
            # Higher than the limits of methods, whose errors name the limit.
            max_received_mb=min(settings.max_message_mb, 4 * settings.max_body_mb),
            on_started=on_started,
            on_drain=drain,
            num_live=lambda: inference.num_live,
            check_operator=check,
            stop=stop,
            shared_http_port=settings.shared_http_port,
        )
    finally:
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        if turns is not None and writer is not None:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await turns.close()
        REGISTRY.unregister(gateway_metrics)
        inference.close()
        if audit is not None:
            await asyncio.to_thread(audit.close)
        trimming.cancel()
        client.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await client
        for task in (keeper, writer):
            if task is not None and not task.cancelled():
                task.result()


def _turns(settings: RouterSettings, inference: Inference, usage: UsageCounts) -> Turns:
    store = TurnStore(open_database(settings.turn_store), f"{socket.gethostname()}:{uuid.uuid4()}")
    return Turns(
        store,
        inference,
        usage,
        retention_s=settings.turn_retention_days * _DAY_S,
        usage_retention_s=settings.usage_retention_days * _DAY_S,
    )


def _vllm_engine(
    inference: Inference, health: Health, settings: RouterSettings, of_flags: Path
) -> Service:
    # Only what is used is loaded.
    from router.vllm_engine.api import vllm_engine_service  # noqa: PLC0415

    async def find_directory(directory: str) -> Path:
        if not directory:
            return of_flags
        return await asyncio.to_thread(
            find_model, directory, settings.cache_dir, with_weights=False
        )

    return vllm_engine_service(inference, health, find_directory)


def _page_middleware(settings: RouterSettings) -> Middleware:
    own = frozenset(map(str.lower, (settings.host, *settings.allowed_hosts)))
    guard = PageGuard(
        None if settings.server_tls is not None else own, frozenset(settings.allowed_origins)
    )
    # If the router does not listen on loopback only, web pages may call all but its operations.
    return guard.middleware(None if is_loopback(settings.host) else openai_api.OPERATOR_PATHS)
