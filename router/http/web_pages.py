"""Keeps web pages from changing a service that obeys whoever calls from its own machine.

A browser there calls what any page tells it to. It tells whose page that is (`Origin`), unless the
page's own name leads to this machine: then the name shows in `Host`. And it asks first whether it
may send a body that it says is JSON, which no route answers.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from contract.errors import PermissionDeniedError
from router.http.errors import UnsupportedMediaTypeError
from router.http.json_text import excerpt

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class PageGuard:
    """Refuses calls of web pages but the service's own; for a router without API keys."""

    own_host: str | None
    """What calls may name besides loopback's names; None: anything, for certificates prove it."""

    def check(self, headers: Mapping[str, str]) -> None:
        """Check a call's headers, `Host` and `Origin`.

        Raises:
            PermissionDeniedError: It may be a page's.
        """
        host, origin = headers.get("Host", ""), headers.get("Origin")
        if self.own_host is not None and not _is_own(host, self.own_host):
            raise PermissionDeniedError(
                f"Host is {excerpt(host)}; a router without API keys obeys calls that name"
                f" localhost, a loopback address or {self.own_host}"
            )
        if origin is not None and _authority(origin) != host.lower():
            raise PermissionDeniedError(
                f"Origin is {excerpt(origin)}; a router without API keys obeys no web page but its"
                f" own, of {excerpt(host)}"
            )


def check_json(content_type: str) -> None:
    """Check that a body is said to be JSON.

    Raises:
        UnsupportedMediaTypeError: It is not.
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
