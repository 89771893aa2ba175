"""Decides which callers are operators; operators may change a process for all its users."""

from collections.abc import Callable
from typing import Final

from contract.errors import PermissionDeniedError
from rpc.settings import ProcessSettings

_LOOPBACK_PEERS: Final = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")


class Operators:
    """Decides whether a caller is an operator."""

    def __init__(
        self,
        check_operator: Callable[[], None] | None,
        *,
        has_client_certificates: bool,
        obeys_loopback: bool,
    ) -> None:
        """`check_operator` raises unless the call has an operator's key; None: calls have no keys.

        If callers need a certificate but no key, every caller is an operator. If callers need
        neither key nor certificate, every caller on a Unix socket is an operator, because file
        permissions protect the socket. With `obeys_loopback`, every caller on the loopback
        interface is an operator, too. Calls that a proxy on this machine forwards also come from
        loopback, so every caller of such a proxy would be an operator.
        """
        self._check_operator = check_operator
        self._has_client_certificates = has_client_certificates
        self._local_peers = ("unix:", *_LOOPBACK_PEERS) if obeys_loopback else ("unix:",)

    def check(self, peer: str, what: str) -> None:
        """Check that the caller is an operator.

        Args:
            peer: The caller as gRPC names it, such as "ipv4:127.0.0.1:52134" or "unix:".
            what: The operation, for the error's message, such as "loads models".

        Raises:
            PermissionDeniedError: The caller is not an operator.
            UnauthenticatedError: The call has no key.
        """
        if self._check_operator is not None:
            self._check_operator()
        elif not self._has_client_certificates and not peer.startswith(self._local_peers):
            raise PermissionDeniedError(
                f"a process without keys or --tls-client-ca {what} only for callers on its Unix"
                f" socket or, with --local-drain, on its own machine; this call is from {peer}"
            )


def operators(settings: ProcessSettings, check_operator: Callable[[], None] | None) -> Operators:
    """Make `Operators` from the settings. A Unix socket has no certificates."""
    return Operators(
        check_operator,
        has_client_certificates=settings.tls_client_ca is not None and settings.uds is None,
        obeys_loopback=settings.local_drain,
    )
