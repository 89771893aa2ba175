"""Who operates a process: whose calls it obeys that change it for everybody."""

from collections.abc import Callable
from typing import Final

from contract.errors import PermissionDeniedError
from rpc.settings import ProcessSettings

_LOOPBACK_PEERS: Final = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")


class Operators:
    """Tells operators from others, by what the process was told of its callers."""

    def __init__(
        self,
        check_operator: Callable[[], None] | None,
        *,
        has_client_certificates: bool,
        obeys_loopback: bool,
    ) -> None:
        """`check_operator` raises unless the call is an operator's; None: calls have no keys.

        Without keys and certificates a Unix socket is obeyed, which its permissions guard;
        `obeys_loopback`: the loopback interface, too, which any proxy on the machine calls by.
        """
        self._check_operator = check_operator
        self._has_client_certificates = has_client_certificates
        self._local_peers = ("unix:", *_LOOPBACK_PEERS) if obeys_loopback else ("unix:",)

    def check(self, peer: str, what: str) -> None:
        """Check that a call may be obeyed.

        Args:
            peer: Where it is from, as gRPC has it: ipv4:127.0.0.1:52134, or unix:.
            what: What is not to be done otherwise, and by what other means it is.

        Raises:
            PermissionDeniedError: It may not.
            UnauthenticatedError: It has no key.
        """
        if self._check_operator is not None:
            self._check_operator()
        elif not self._has_client_certificates and not peer.startswith(self._local_peers):
            raise PermissionDeniedError(
                f"a process without keys or --tls-client-ca {what} by its Unix socket or, with"
                f" --local-drain, from its own machine; this call is from {peer}"
            )


def operators(settings: ProcessSettings, check_operator: Callable[[], None] | None) -> Operators:
    """Say who they are, as the settings have it. A Unix socket has no certificates."""
    return Operators(
        check_operator,
        has_client_certificates=settings.tls_client_ca is not None and settings.uds is None,
        obeys_loopback=settings.local_drain,
    )
