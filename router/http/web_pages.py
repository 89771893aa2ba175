"""Prevents web pages from operating a service that trusts calls from its own machine.

A browser on that machine makes any call that a page requests. It sends the page's `Origin`. If the
page's host name resolves to this machine, the name is in `Host`. Before the browser sends a JSON
body to another origin, it asks for permission, which no route gives.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from contract.errors import PermissionDeniedError
from router.http.errors import UnsupportedMediaTypeError
from router.http.strict_json import excerpt

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class PageGuard:
    """Refuses calls of web pages other than the service's own, for routers without API keys."""

    own_host: str | None
    """A name that `Host` may have, besides loopback names; None: any, because TLS proves it."""

    def check(self, headers: Mapping[str, str]) -> None:
        """Check the headers `Host` and `Origin` of a call.

        Raises:
            PermissionDeniedError: Another web page may have made the call.
        """
        host, origin = headers.get("Host", ""), headers.get("Origin")
        if self.own_host is not None and not _is_own(host, self.own_host):
            raise PermissionDeniedError(
                f"Host is {excerpt(host)}; a router without API keys accepts this call only for"
                f" localhost, a loopback address or {self.own_host}"
            )
        if origin is not None and _authority(origin) != host.lower():
            raise PermissionDeniedError(
                f"Origin is {excerpt(origin)}; a router without API keys accepts this call only"
                f" from its own pages, at {excerpt(host)}"
            )


def check_json(content_type: str) -> None:
    """Check that the Content-Type is JSON.

    Raises:
        UnsupportedMediaTypeError: It is another type.
    """
    if content_type != _JSON:
        raise UnsupportedMediaTypeError(f"Content-Type is {content_type}; it must be {_JSON}")


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _is_own(host: str, own_host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    if name is None:
        return False
    if name in ("localhost", own_host.lower()):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
