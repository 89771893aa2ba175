"""`python -m docs.generate` writes docs/reference; with --check it only compares."""

import sys
from pathlib import Path

from docs.generate import flags, metrics, routes, rpcs

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
NOTICE = "<!-- Written by `make docs` from the code; change it there. -->\n"


def pages() -> dict[str, str]:
    """Return each page's text, by its file name."""
    written = {
        "flags.md": flags.page(),
        "metrics.md": metrics.page(),
        "rpcs.md": rpcs.page(ROOT / "protos"),
        "http.md": routes.page(),
    }
    return {name: f"{NOTICE}{text.rstrip()}\n" for name, text in written.items()}


def stale() -> list[str]:
    """Return the pages that are not what the code says."""
    return [
        name
        for name, text in pages().items()
        if not (REFERENCE / name).is_file() or (REFERENCE / name).read_text() != text
    ]


def main(argv: list[str]) -> int:
    """Write the pages, or compare them; return the exit code."""
    if argv == ["--check"]:
        for name in (names := stale()):
            print(f"docs/reference/{name} is not what the code says: run `make docs`")
        return 1 if names else 0
    REFERENCE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)
        print(f"docs/reference/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
