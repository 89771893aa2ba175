"""Certificates for tests: an authority, and files that it has signed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import trustme


@dataclass(frozen=True)
class Files:
    """A certificate, its key, and the authorities to trust."""

    cert: Path
    key: Path
    ca: Path

    @property
    def as_server(self) -> dict[str, Path]:
        return {"tls_cert": self.cert, "tls_key": self.key}

    @property
    def as_peer(self) -> dict[str, Path]:
        """Settings for mutual TLS: the process shows its certificate, and requires its peers'."""
        return {**self.as_server, "tls_ca": self.ca, "tls_client_ca": self.ca}

    def flags(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={path}" for name, path in self.as_peer.items()]


class Authority:
    """Signs certificates and writes them to one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *hosts: str) -> Files:
        """Writes `name`.pem and its key; replaces existing files."""
        issued = self._ca.issue_cert(*(hosts or ("localhost", "127.0.0.1")))
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return Files(cert, key, self.ca)

    @classmethod
    def stranger(cls, folder: Path) -> Self:
        """An authority that no process trusts."""
        return cls(folder)
