"""TLS of a process: its certificate, its trusted authorities, and reloading of replaced files.

Unix sockets do not use TLS; their file permissions control access.
"""

import ssl
from collections.abc import Callable, Sequence
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
    """A server's certificate and the authorities of its clients. All are PEM files."""

    cert: Path
    """The certificate, followed by intermediate certificates."""
    key: Path
    client_ca: Path | None = None
    """Authorities, one of which must have signed a client's certificate.

    None: clients need no certificate.
    """


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The authorities that a client trusts, and its own certificate. All are PEM files."""

    ca: Path
    """Authorities, one of which must have signed the server's certificate."""
    cert: Path | None = None
    """The client's own certificate, for servers that require one."""
    key: Path | None = None
    server_name: str = ""
    """The name that the server's certificate must have; empty: the host of the target."""


def is_local(target: str) -> bool:
    """Whether a gRPC target is a Unix socket, which has no TLS."""
    return target.startswith(_LOCAL_PREFIXES)


_TLS_WANTED: Final = "the server may require TLS (--tls-ca) or a client certificate (--tls-cert)"
_SIGN_TO_HINT: Final = {
    "WRONG_VERSION_NUMBER": "the server does not use TLS; leave out --tls-ca",
    "Hostname Verification": "its certificate has another name; set it with --tls-server-name",
    "CERTIFICATE_VERIFY_FAILED": "no authority in --tls-ca has signed its certificate",
    "Socket closed": _TLS_WANTED,
    "Connection reset by peer": _TLS_WANTED,
}


def explain(details: str) -> str:
    """Add a hint to gRPC's message about a failed connection, if the cause is known."""
    for sign, hint in _SIGN_TO_HINT.items():
        if details.startswith("failed to connect") and sign in details:
            return f"{details} ({hint})"
    return details


def check_certificate(cert: Path, key: Path) -> None:
    """Raise ValueError unless certificate and key can be read and belong together."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        raise ValueError(f"certificate {cert} with key {key}: {_reason(error)}") from None


def check_authorities(ca: Path) -> None:
    """Raise ValueError unless the file `ca` can be read and has a certificate."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise ValueError(f"authorities {ca}: {_reason(error)}") from None


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Make a channel's credentials; files that are replaced later affect only new channels."""
    return grpc.ssl_channel_credentials(
        root_certificates=tls.ca.read_bytes(),
        private_key=None if tls.key is None else tls.key.read_bytes(),
        certificate_chain=None if tls.cert is None else tls.cert.read_bytes(),
    )


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Make a gRPC server's credentials; each handshake uses the current files."""

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
    """Make an HTTP server's TLS context; each handshake uses the current files.

    The handshake accepts clients without a certificate, because probes have no certificate. The
    application refuses a call that needs a certificate if the client has none. A certificate that
    no authority in `tls.client_ca` has signed ends the handshake.
    """
    return _reloading_context(tls, ssl.CERT_OPTIONAL, ())


def http2_context(tls: ServerTls) -> ssl.SSLContext:
    """Make the TLS context of an `Http2Server`; each handshake uses the current files."""
    return _reloading_context(tls, ssl.CERT_REQUIRED, ("h2",))


def _reloading_context(
    tls: ServerTls, of_clients: ssl.VerifyMode, protocols: Sequence[str]
) -> ssl.SSLContext:
    """Make a server's TLS context; each handshake uses the current files of `tls`.

    `of_clients` says whether clients need a certificate; without `tls.client_ca` they need none.
    """

    def read() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.client_ca)
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
        if protocols:
            context.set_alpn_protocols(protocols)
        if tls.client_ca is not None:
            context.verify_mode = of_clients
        return context

    newest = _Newest(tls, read)

    def replace(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = newest.get()

    context = newest.get()
    context.sni_callback = replace
    return context


class _Newest(Generic[T]):
    """Caches the result of `read`; calls `read` again when a file of `tls` changes. Thread-safe."""

    def __init__(self, tls: ServerTls, read: Callable[[], T]) -> None:
        self._files = [file for file in (tls.cert, tls.key, tls.client_ca) if file is not None]
        self._read = read
        self._stamps = self._look()
        self._value = read()

    def get(self) -> T:
        """Return the current value; called at each handshake.

        If the files cannot be read, perhaps because they are being written, this call returns the
        old value, and the next handshake tries again.
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
        # Compare inodes as well: Kubernetes replaces a mounted secret by switching a link.
        stats = [file.stat() for file in self._files]
        return [(stat.st_mtime_ns, stat.st_ino) for stat in stats]


def _no_password() -> str:
    # Without this function, OpenSSL would ask for a password on the terminal.
    raise ValueError("the key is encrypted; it must not be")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
