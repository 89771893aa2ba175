"""What HTTP asks of clients whose certificates it wants: one, but for probes."""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

_OPEN_PATHS: Final = frozenset(("/health", "/ready"))
"""A kubelet has no certificate."""


@web.middleware
async def require_certificate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 401 to who has shown no certificate; TLS itself refuses a wrong one."""
    if request.path in _OPEN_PATHS:
        return await handler(request)
    transport = request.transport
    if transport is None or not transport.get_extra_info("peercert"):
        return web.json_response(
            {"error": {"message": "a client certificate is required", "code": 401}}, status=401
        )
    return await handler(request)
