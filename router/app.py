"""Builds a router from its settings and runs it: the only place that constructs its parts."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from router.access.authentication import KeyInterceptor, key_middleware
from router.access.tenancy import check_operator
from router.grpc.api import inference_service
from router.grpc.operations import operator_services
from router.http import api as openai_api
from router.http.web_pages import PageGuard
from router.kserve.api import kserve_service
from router.operations import Operations
from router.request.inference import Inference
from router.schedulers.link import LinkConfig
from router.schedulers.pool import Schedulers
from router.settings import RouterSettings
from router.text.tokenizer import Tokenizers, load_tokenizer
from router.ui.api import Ui
from rpc.health import Health
from rpc.peers.discovery import Discovery
from rpc.security.operators import operators
from rpc.server import Addresses, serve

_MIB = 1024 * 1024


async def run_router(
    settings: RouterSettings,
    stop: asyncio.Event | None = None,
    on_started: Callable[[Addresses], Awaitable[None]] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; live requests finish first.

    `on_started` gets the addresses; the router is ready once it has a scheduler. Raises
    FileNotFoundError or ValueError if the model directory's tokenizer cannot be read, and what
    breaks the scheduler client: a bug.
    """
    stop = asyncio.Event() if stop is None else stop
    health = Health()
    health.set_starting("reading the tokenizer")
    tokenizers = Tokenizers(await asyncio.to_thread(load_tokenizer, settings.model))
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
    inference = Inference(
        settings.model_name,
        tokenizers,
        schedulers,
        max_live_requests=settings.max_live_requests,
        tokenizer_threads=settings.tokenizer_threads,
        chats=settings.chats,
        api_keys=api_keys,
    )
    ui = Ui(inference) if settings.ui else None
    open_paths = frozenset() if ui is None else ui.open_paths
    http = web.Application(
        middlewares=[] if api_keys is None else [key_middleware(api_keys, open_paths)]
    )
    check = None if api_keys is None else check_operator
    operations = Operations(
        schedulers, inference.model, operators(settings, check), settings.client_tls
    )
    http.add_routes(
        openai_api.routes(
            inference,
            operations,
            guard=_page_guard(settings) if api_keys is None else None,
            max_body_bytes=settings.max_body_mb * _MIB,
        )
    )
    if ui is not None:
        http.add_routes(ui.routes())
    client = asyncio.create_task(schedulers.run(), name="schedulers")
    client.add_done_callback(lambda _: stop.set())  # it ends by itself only when it breaks
    try:
        await serve(
            settings,
            health=health,
            services=[
                inference_service(inference),
                kserve_service(inference, lambda: health.ready),
                *operator_services(operations),
            ],
            http=http,
            interceptors=[] if api_keys is None else [KeyInterceptor(api_keys)],
            on_started=on_started,
            on_drain=inference.drain,
            num_live=lambda: inference.num_live,
            check_operator=check,
            stop=stop,
        )
    finally:
        inference.close()
        client.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await client


def _page_guard(settings: RouterSettings) -> PageGuard:
    return PageGuard(None if settings.server_tls is not None else settings.host)
