"""Checks the API key of every HTTP call, before any API sees it."""

from collections.abc import Collection, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from contract.errors import UnauthenticatedError
from router import metrics
from router.access.api_keys import ApiKeys
from router.http.errors import error_response


def key_middleware(keys: ApiKeys, open_paths: Collection[str] = ()) -> Middleware:
    """Make the middleware that answers 401 to calls without a valid key.

    GET and HEAD of `open_paths` need no key, so the answers there must not contain a user's data.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in open_paths and request.method in ("GET", "HEAD"):
            return await handler(request)
        try:
            keys.enter(_authorization(request.headers))
        except UnauthenticatedError as error:
            metrics.REQUESTS_REFUSED.labels("", error.code.name).inc()
            response = error_response(error, path=request.path)
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return await handler(request)

    return middleware


def _authorization(headers: Mapping[str, str]) -> str | None:
    """Return the authorization header; for Anthropic's clients, make it from `x-api-key`."""
    key = headers.get("x-api-key")
    return headers.get("Authorization", None if key is None else f"Bearer {key}")
