"""Prevents web pages from using a service that trusts calls from its own machine.

A browser on that machine makes any call that a page asks for, and sends the page's `Origin`. With
DNS rebinding, the name of the page's host resolves to the service's machine. Then the header `Host`
has the name of the page's host. Before a browser sends a JSON body to another origin, it asks for
permission (CORS), which no route gives.
"""

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from contract.errors import PermissionDeniedError
from router.http.errors import error_response
from router.http.strict_json import excerpt


@dataclass(frozen=True, slots=True)
class PageGuard:
    """Refuses calls from web pages of other sites, for routers without API keys."""

    hosts: frozenset[str] | None
    """Names that `Host` may have in addition to loopback names; None: any name, because TLS
    verifies the name."""
    origins: frozenset[str] = frozenset()
    """Origins of other sites whose pages may call, such as "https://example.com"."""

    def check(self, headers: Mapping[str, str]) -> None:
        """Check the headers `Host` and `Origin` of a call.

        Raises:
            PermissionDeniedError: The call may come from a web page of another site.
        """
        host, origin = headers.get("Host", ""), headers.get("Origin")
        if self.hosts is not None and not _is_own(host, self.hosts):
            raise PermissionDeniedError(
                f"Host is {excerpt(host)}; a router without API keys accepts this call only for"
                f" localhost, a loopback address or {', '.join(sorted(self.hosts))}"
                " (--allowed-hosts)"
            )
        if origin is not None and origin not in self.origins and _authority(origin) != host.lower():
            raise PermissionDeniedError(
                f"Origin is {excerpt(origin)}; a router without API keys accepts this call only"
                f" from its own pages, at {excerpt(host)} (--allowed-origins)"
            )

    def middleware(self, paths: Collection[str] | None) -> Middleware:
        """Return middleware that answers with status 403 if `check` refuses a call.

        The middleware guards `paths`, or all paths if `paths` is None.
        """

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            if paths is None or request.path in paths:
                try:
                    self.check(request.headers)
                except PermissionDeniedError as error:
                    return error_response(error, path=request.path)
            return await handler(request)

        return middleware


def is_loopback(host: str) -> bool:
    """Whether an address or name can be reached from its own machine only."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _is_own(host: str, own_hosts: Collection[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and (name in own_hosts or is_loopback(name))
