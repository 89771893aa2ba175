"""Checks the names in client certificates, for gRPC and HTTP.

TLS accepts every certificate that a trusted authority has signed. If one authority signs the
certificates of routers, schedulers, workers and clients, the names decide which of these may call
this process.
"""

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from contract.errors import PermissionDeniedError, QuireError, UnauthenticatedError
from rpc.status import rewrapped

_OPEN_PATHS: Final = frozenset(("/health", "/ready"))
"""Paths that need no certificate, for probes."""
_SAN_KEY: Final = "x509_subject_alternative_name"
_COMMON_NAME_KEY: Final = "x509_common_name"


def check_names(names: Sequence[str], accepted: Collection[str]) -> None:
    """Check that one of a certificate's names is in `accepted`, unless `accepted` is empty.

    Raises:
        UnauthenticatedError: There is no certificate, or it has no name.
        PermissionDeniedError: No name of the certificate is accepted.
    """
    if not accepted or not set(names).isdisjoint(accepted):
        return
    if not names:
        raise UnauthenticatedError("a client certificate with a name is required")
    raise PermissionDeniedError(
        f"the client certificate has the names {', '.join(names)}; this process accepts"
        f" {', '.join(sorted(accepted))} (--tls-client-names)"
    )


class NameInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses callers whose certificate has none of the accepted names."""

    def __init__(self, accepted: Collection[str]) -> None:
        self._accepted = frozenset(accepted)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Make the handler check its caller, because the caller is known only in the handler."""
        handler = await continuation(handler_call_details)
        return None if handler is None else rewrapped(handler, self._guarded)

    def _guarded(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behavior):

            async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
                self._check(context)
                async with contextlib.aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response

            return generate

        async def call(request: Any, context: Any) -> Any:
            self._check(context)
            return await behavior(request, context)

        return call

    def _check(self, context: Any) -> None:
        if context.peer().startswith("unix:"):  # has no TLS; file permissions protect it
            return
        auth: Mapping[str, Sequence[bytes]] = context.auth_context()
        # As in RFC 6125, the common name counts only if there is no alternative name.
        names = auth.get(_SAN_KEY) or auth.get(_COMMON_NAME_KEY) or ()
        check_names([name.decode(errors="replace") for name in names], self._accepted)


def auth_context(certificate: Mapping[str, Any] | None) -> dict[str, list[bytes]]:
    """Return the names in a client's certificate, in the format of gRPC's authentication context.

    `certificate` is as parsed by `ssl`; None: the client has no certificate.
    """
    certificate = certificate or {}
    names = [value.encode() for _, value in certificate.get("subjectAltName", ())]
    common = [value.encode() for value in _common_names(certificate)]
    found = {_SAN_KEY: names, _COMMON_NAME_KEY: common}
    return {key: values for key, values in found.items() if values}


def certificate_middleware(accepted: Collection[str]) -> Middleware:
    """Make the middleware that answers 401 or 403 to calls without an accepted certificate.

    401: the call has no certificate. 403: no name of the certificate is accepted. TLS has already
    refused certificates that no trusted authority has signed. Probes need no certificate.
    """

    @web.middleware
    async def require(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _OPEN_PATHS:
            return await handler(request)
        transport = request.transport
        certificate = None if transport is None else transport.get_extra_info("peercert")
        try:
            if not certificate:
                raise UnauthenticatedError("a client certificate is required")
            check_names(_names_of(certificate), accepted)
        except QuireError as error:
            body = {"error": {"message": str(error), "code": error.http_status}}
            return web.json_response(body, status=error.http_status)
        return await handler(request)

    return require


def _names_of(certificate: Mapping[str, Any]) -> list[str]:
    """Return a certificate's alternative names; if it has none, its common names."""
    alternatives = [value for _, value in certificate.get("subjectAltName", ())]
    return alternatives or _common_names(certificate)


def _common_names(certificate: Mapping[str, Any]) -> list[str]:
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    return [value for kind, value in subject if kind == "commonName"]
