"""The page's files, and the headers that restrict what the page can do."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Final

PAGE_PATH: Final = "/ui"

HEADERS: Final = MappingProxyType(
    {
        # Allow only files of this origin, nothing inline and no frames, so that request ids and
        # generated text cannot run as code.
        "Content-Security-Policy": (
            "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
)

_SUFFIX_TO_TYPE: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Page:
    """A file and its path in URLs."""

    path: str
    content: bytes
    content_type: str


def read_pages() -> Iterable[Page]:
    """Read the page, served at `PAGE_PATH`, and its other files, served below that path."""
    for file in (files(__package__) / "static").iterdir():
        stem, dot, suffix = file.name.rpartition(".")
        path = PAGE_PATH if file.name == "index.html" else f"{PAGE_PATH}/{file.name}"
        assert stem, f"{file.name} is not a file of the page"
        yield Page(path, file.read_bytes(), _SUFFIX_TO_TYPE[dot + suffix])
