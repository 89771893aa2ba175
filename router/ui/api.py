"""The routes of the web page: files, which need no API key, and data, which need one."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from aiohttp import web

from contract.errors import NotFoundError
from quire.v1.common_pb2 import ActivityQuery
from quire.v1.kv_pb2 import KvQuery
from router.http.errors import error_response, failure_response
from router.http.strict_json import json_bytes
from router.request.cells import Cells
from router.ui.pages import HEADERS, PAGE_PATH, Page, read_pages
from router.ui.wire import activity_to_json, kv_to_json, message_to_json, query_from_url

API_PATH: Final = f"{PAGE_PATH}/api"

_MAX_SHOWN: Final = 64

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Ui:
    """Serves the web page of one router."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._path_to_page = {page.path: page for page in read_pages()}

    @property
    def open_paths(self) -> frozenset[str]:
        """The paths that need no API key: a browser loads them before the user enters a key."""
        return frozenset((*self._path_to_page, f"{PAGE_PATH}/"))

    def routes(self) -> list[web.AbstractRouteDef]:
        """The routes below `PAGE_PATH`."""
        return [
            web.get(PAGE_PATH, self._page),
            web.get(f"{PAGE_PATH}/", self._redirect),
            web.get(f"{PAGE_PATH}/{{file}}", self._file),
            web.get(f"{API_PATH}/load", _endpoint(self._load)),
            web.get(f"{API_PATH}/kv", _endpoint(self._kv)),
            web.get(f"{API_PATH}/activity", _endpoint(self._activity)),
        ]

    async def _page(self, _: web.Request) -> web.StreamResponse:
        """Return the web page."""
        return _file_response(self._path_to_page[PAGE_PATH])

    async def _redirect(self, _: web.Request) -> web.StreamResponse:
        """Redirect to the web page."""
        # The location is relative, for proxies that add a path prefix.
        return web.Response(status=308, headers={"Location": f"..{PAGE_PATH}"})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """Return a file of the web page."""
        page = self._path_to_page.get(request.path)
        if page is None:
            return error_response(NotFoundError(f"there is no {request.path[:_MAX_SHOWN]}"))
        return _file_response(page)

    async def _load(self, _: web.Request) -> object:
        """Return the load of the service: the protobuf message `Load`, as JSON."""
        return message_to_json(await self._cells.load())

    async def _kv(self, request: web.Request) -> object:
        """Return which sequences hold which KV blocks, as `WorkerKv`; the query is a `KvQuery`."""
        workers = await self._cells.describe_kv(query_from_url(KvQuery, request.query))
        return {"workers": [kv_to_json(worker) for worker in workers]}

    async def _activity(self, request: web.Request) -> object:
        """Return the workers' activity, as `WorkerActivity`; the query is an `ActivityQuery`."""
        query = query_from_url(ActivityQuery, request.query)
        workers = await self._cells.describe_activity(query)
        return {"workers": [activity_to_json(worker) for worker in workers]}


def _file_response(page: Page) -> web.Response:
    return web.Response(
        body=page.content, content_type=page.content_type, charset="utf-8", headers=HEADERS
    )


def _endpoint(read: Callable[[web.Request], Awaitable[Any]]) -> _Handler:
    """Make the handler of a JSON route; errors have the same form as those of other routes."""

    @functools.wraps(read)
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            body = json_bytes(await read(request))
            response = web.Response(body=body, content_type="application/json")
        except Exception as error:  # noqa: BLE001 - every error becomes a response
            response = failure_response(error, path=request.path)
        response.headers["Cache-Control"] = "no-store"
        return response

    return handle
