"""A Kubernetes Lease that names the serving scheduler, as a hint for its standbys.

The serving scheduler renews the Lease, and gives the Lease up when the scheduler ends. Each standby
watches the Lease. A standby claims the Lease before it takes over, so only one of several standbys
takes over. While the Lease is free, a standby waits less before it concludes that the workers have
no scheduler. Safety does not depend on the Lease, because workers obey only the newest epoch. While
the Lease cannot be read or written, schedulers behave as if there were no Lease.
"""

import asyncio
import json
import ssl
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import structlog

DURATION_S: Final = 6
"""A Lease that has not changed for this many seconds has expired."""
_RENEW_S: Final = 2.0
_RETRY_S: Final = 2.0
"""The pause after a failed watch, and the least time between the starts of two watches."""
_HEAD_START_S: Final = 2.0
"""For this long after a claim, no other scheduler may claim the Lease, so that the scheduler that
has claimed it can take over."""
_WRITE_S: Final = 1.0
"""How long a write to the Lease may take. The limit is short, because a scheduler waits for a write
before it takes over, and again before it ends."""
_READ_S: Final = 2.0
_WATCH_S: Final = 60
_QUIET_S: Final = 4.0
"""After this long without a change, the Lease object is read again, because its watch may be dead.
`_QUIET_S` and `_READ_S` together are at most `DURATION_S`, so this read ends before the Lease
counts as expired. If the watch is dead, the read finds the changes that the watch missed. If the
API server is dead, the read fails, and a Lease that cannot be read does not count as expired."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a pod finds its cluster's API server and its own service account."""

    url: str = "https://kubernetes.default.svc"
    account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class LeaseError(Exception):
    """The Lease cannot be read or written."""


class Lease:
    """The Lease, as an async context manager.

    On entry, the scheduler begins to watch the Lease. On exit, a scheduler that holds the Lease
    gives it up.
    """

    def __init__(self, name: str, holder: str, cluster: Cluster | None = None) -> None:
        """`holder` names this scheduler; a random suffix is added, to tell its runs apart."""
        self._name = name
        self._holder = f"{holder}_{uuid.uuid4().hex[:8]}"
        self._cluster = cluster or Cluster()
        self._session: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | bool | None = None
        self._watching: asyncio.Task[None] | None = None
        self._found: dict[str, Any] | None = None
        """The Lease object as last seen; None: it cannot be read."""
        self._changed_at = 0.0
        """When a change of the object was last seen, on the monotonic clock."""
        self._moved_at = float("-inf")
        """When a change of the holder was last seen, on the monotonic clock."""
        self._failures: dict[str, str] = {}
        """Maps "read" to the reason why the last read failed, and "written" to the reason why the
        last write failed. A key is missing if there was no failure."""

    async def __aenter__(self) -> Self:
        """Begin to watch the Lease."""
        self._session = aiohttp.ClientSession(read_bufsize=1 << 19)
        self._watching = asyncio.create_task(self._keep_watch(), name="lease")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the Lease up if this scheduler holds it."""
        if self._is_mine and not await self._write("") and self._is_mine:
            await self._write("")  # the object had changed, but not its holder
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    @property
    def is_free(self) -> bool:
        """Whether the Lease was given up or has expired.

        False if the Lease cannot be read. Also False if no scheduler has ever written to the Lease:
        a scheduler that lacks the permission to write to the Lease may be serving.
        """
        if self._found is None or "renewTime" not in _spec_of(self._found):
            return False
        is_expired = time.monotonic() - self._changed_at > DURATION_S
        return is_expired or not _holder_of(self._found)

    async def claim(self) -> bool:
        """Write this scheduler into the Lease; return whether this scheduler may take over.

        It may not take over if another scheduler has just claimed the Lease.
        """
        if self._found is None:
            return True
        has_just_moved = time.monotonic() - self._moved_at < _HEAD_START_S
        if has_just_moved and not self.is_free and not self._is_mine:
            return False
        return await self._write(self._holder)

    async def keep(self) -> None:
        """Hold the Lease until cancelled, except while another scheduler renews it."""
        while True:
            if self._is_mine or self.is_free or (self._found and not _holder_of(self._found)):
                await self._write(self._holder)
            await asyncio.sleep(_RENEW_S)

    @property
    def _is_mine(self) -> bool:
        return self._found is not None and _holder_of(self._found) == self._holder

    # --- calls ----------------------------------------------------------------------------------

    async def _write(self, holder: str) -> bool:
        """Write `holder` to the Lease; return False if the object has changed since it was read.

        If it has changed, the object is not written, but read again.
        """
        assert self._found is not None, "the object was read"
        spec = dict(_spec_of(self._found))
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if holder and holder != _holder_of(self._found):
            spec["leaseTransitions"] = spec.get("leaseTransitions", 0) + 1
            spec["acquireTime"] = now
        spec |= {"holderIdentity": holder, "renewTime": now, "leaseDurationSeconds": DURATION_S}
        changed = {**self._found, "spec": spec}  # with the resourceVersion that was read
        has_changed = False
        try:
            async with asyncio.timeout(_WRITE_S):
                async with self._call("PUT", f"/{self._name}", json=changed) as response:
                    has_changed = response.status == HTTPStatus.CONFLICT
                    if not has_changed:
                        self._see(await _json_of(response))
                        self._failures.pop("written", None)
                if has_changed:  # the watch is late or dead
                    self._see(await self._read())
        except Exception as error:  # noqa: BLE001 - whatever it is, the Lease is only a hint
            self._fail("written", error)
        return not has_changed

    async def _keep_watch(self) -> None:
        while True:
            began_at = time.monotonic()
            try:
                async with aclosing(self._versions()) as versions:
                    async for found in versions:
                        self._see(found)
                        self._failures.pop("read", None)
            except Exception as error:  # noqa: BLE001 - as in `_write`
                self._found = None
                self._fail("read", error)
                await asyncio.sleep(_RETRY_S)
            else:  # a proxy may end each watch at once
                await asyncio.sleep(began_at + _RETRY_S - time.monotonic())

    async def _read(self) -> dict[str, Any]:
        async with asyncio.timeout(_READ_S), self._call("GET", f"/{self._name}") as response:
            return await _json_of(response)

    async def _versions(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the Lease object now and after each change.

        End when the watch ends, or when no change comes for `_QUIET_S`.
        """
        found = await self._read()
        yield found
        query = (
            f"?watch=1&fieldSelector=metadata.name%3D{self._name}"
            f"&resourceVersion={_version_of(found)}&timeoutSeconds={_WATCH_S}"
        )
        async with self._call("GET", query) as response:
            if response.status != HTTPStatus.OK:
                raise LeaseError(await _problem_of(response))
            while line := await _line_of(response):
                event = json.loads(line)
                if event["type"] not in {"ADDED", "MODIFIED"}:
                    raise LeaseError(f"its watch ended: {event['type']}")
                yield event["object"]

    def _call(self, method: str, path: str, **more: Any) -> Any:
        """Call the API server; raises OSError if this pod has no service account."""
        assert self._session is not None, "within `async with`"
        account = self._cluster.account
        namespace = (account / "namespace").read_text().strip()
        token = (account / "token").read_text().strip()  # Kubernetes replaces it before it expires
        if self._tls is None:
            is_https = self._cluster.url.startswith("https:")
            self._tls = not is_https or ssl.create_default_context(cafile=account / "ca.crt")
        return self._session.request(
            method,
            f"{self._cluster.url}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases{path}",
            headers={"Authorization": f"Bearer {token}"},
            ssl=self._tls,
            timeout=aiohttp.ClientTimeout(total=None, connect=_READ_S, sock_read=_QUIET_S),
            **more,
        )

    def _see(self, found: dict[str, Any]) -> None:
        """Remember a version of the Lease object, and when the object and the holder changed."""
        before, self._found = self._found, found
        now = time.monotonic()
        if before is None or _version_of(before) != _version_of(found):
            self._changed_at = now
        if before is not None and _holder_of(before) != _holder_of(found):
            self._moved_at = now

    def _fail(self, done: str, error: Exception) -> None:
        """Log why the Lease could not be read or written; log no reason twice in a row."""
        self._tls = None
        reason = str(error) or type(error).__name__
        if reason != self._failures.get(done):
            self._failures[done] = reason
            log.warning("the lease is ignored", lease=self._name, cannot_be=done, reason=reason)


async def _line_of(response: aiohttp.ClientResponse) -> bytes:
    """Return the next line of a watch; empty if the watch ended or was silent for `_QUIET_S`."""
    try:
        return await response.content.readline()
    except TimeoutError:
        return b""


async def _json_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    if response.status != HTTPStatus.OK:
        raise LeaseError(await _problem_of(response))
    body: dict[str, Any] = await response.json()
    return body


async def _problem_of(response: aiohttp.ClientResponse) -> str:
    return f"HTTP {response.status}: {(await response.text())[:500]}"


def _spec_of(found: dict[str, Any]) -> dict[str, Any]:
    return found.get("spec") or {}


def _holder_of(found: dict[str, Any]) -> str:
    return _spec_of(found).get("holderIdentity") or ""


def _version_of(found: dict[str, Any]) -> str:
    version: str = found["metadata"]["resourceVersion"]
    return version
