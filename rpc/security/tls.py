"""TLS of a process: the certificate that it shows, whom it believes, and files that are replaced.

Unix sockets have none: their permissions say who may connect.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import grpc
import structlog

_LOCAL_PREFIXES: Final = ("unix:", "unix-abstract:")

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server shows, and whom it lets in. All are PEM files."""

    cert: Path
    """The certificate, followed by those between it and its authority."""
    key: Path
    client_ca: Path | None = None
    """Authorities of which each client must have a certificate; None: clients need none."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Whom a client believes, and what it shows. All are PEM files."""

    ca: Path
    """Authorities of which the server must have a certificate."""
    cert: Path | None = None
    """The client's own, for servers that ask for one."""
    key: Path | None = None
    server_name: str = ""
    """The name that the server's certificate must have; empty: the host that is dialled."""


def is_local(target: str) -> bool:
    """Say whether a gRPC target is a Unix socket, which has no TLS."""
    return target.startswith(_LOCAL_PREFIXES)


_SIGN_TO_HINT: Final = {
    "WRONG_VERSION_NUMBER": "it speaks no TLS there; without --tls-ca it is called in the clear",
    "Hostname Verification": "its certificate has another name; --tls-server-name says which",
    "CERTIFICATE_VERIFY_FAILED": "no authority in --tls-ca has signed its certificate",
    "Socket closed": "perhaps it wants TLS (--tls-ca), or a certificate of a client (--tls-cert)",
}


def explain(details: str) -> str:
    """Add to gRPC's words on a connection that failed what they mean, if that is known."""
    for sign, hint in _SIGN_TO_HINT.items():
        if details.startswith("failed to connect") and sign in details:
            return f"{details} ({hint})"
    return details


def check_certificate(cert: Path, key: Path) -> None:
    """Check that both files can be read and belong together.

    Raises:
        ValueError: They cannot, or do not.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        raise ValueError(f"certificate {cert} with key {key}: {_reason(error)}") from None


def check_authorities(ca: Path) -> None:
    """Check that the file can be read and has a certificate.

    Raises:
        ValueError: It cannot, or has none.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise ValueError(f"authorities {ca}: {_reason(error)}") from None


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Read the files, once: a channel shows the same certificate for as long as it lives."""
    return grpc.ssl_channel_credentials(
        root_certificates=tls.ca.read_bytes(),
        private_key=None if tls.key is None else tls.key.read_bytes(),
        certificate_chain=None if tls.cert is None else tls.cert.read_bytes(),
    )


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Make what a gRPC server listens with; files that are replaced count from then on."""

    def read() -> grpc.ServerCertificateConfiguration:
        check_certificate(tls.cert, tls.key)
        return grpc.ssl_server_certificate_configuration(
            [(tls.key.read_bytes(), tls.cert.read_bytes())],
            root_certificates=None if tls.client_ca is None else tls.client_ca.read_bytes(),
        )

    newest = _Newest(tls, read)
    return grpc.dynamic_ssl_server_credentials(
        newest.get(), newest.get, require_client_authentication=tls.client_ca is not None
    )


def http_context(tls: ServerTls) -> ssl.SSLContext:
    """Make what an HTTP server listens with; files that are replaced count from then on.

    A client's certificate is asked for but may be missing, so that probes, which have none, get
    their answer: who needs one is the application's to say. One of a wrong authority ends the
    handshake.
    """

    def read() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.client_ca)
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
        if tls.client_ca is not None:
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    newest = _Newest(tls, read)

    def replace(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = newest.get()

    context = newest.get()
    context.sni_callback = replace
    return context


class _Newest(Generic[T]):
    """What was made of the files as they are now. May be called from any thread."""

    def __init__(self, tls: ServerTls, read: Callable[[], T]) -> None:
        """Raises what `read` raises."""
        self._files = [file for file in (tls.cert, tls.key, tls.client_ca) if file is not None]
        self._read = read
        self._stamps = self._look()
        self._value = read()

    def get(self) -> T:
        """Look at the files, and read them if they have changed.

        Called at each handshake. What cannot be read, perhaps because it is just being written,
        changes nothing, and is tried again at the next one.
        """
        try:
            stamps = self._look()
            if stamps != self._stamps:
                self._value = self._read()
                self._stamps = stamps
                log.info("new certificate", cert=str(self._files[0]))
        except (OSError, ValueError) as error:
            log.warning("the new certificate cannot be used", reason=_reason(error))
        return self._value

    def _look(self) -> list[tuple[int, int]]:
        # A mounted secret is replaced by a symbolic link: the inode tells that, too.
        stats = [file.stat() for file in self._files]
        return [(stat.st_mtime_ns, stat.st_ino) for stat in stats]


def _no_password() -> str:
    # Else OpenSSL asks on the terminal.
    raise ValueError("the key is encrypted; it must be in the clear")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
