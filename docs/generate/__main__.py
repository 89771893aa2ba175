"""`python -m docs.generate` writes docs/reference and the charts; with --check it only compares."""

import sys
from pathlib import Path

from docs.generate import chart, flags, metrics, routes, rpcs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTICE = "<!-- Written by `make docs` from the code; change it there. -->\n"


def pages() -> dict[str, str]:
    """Return each written file's text, by its path below docs."""
    reference = {
        "reference/flags.md": flags.page(),
        "reference/metrics.md": metrics.page(),
        "reference/rpcs.md": rpcs.page(ROOT / "protos"),
        "reference/http.md": routes.page(),
    }
    written = {name: f"{NOTICE}{text.rstrip()}\n" for name, text in reference.items()}
    for measured in sorted((DOCS / "measurements").glob("*.json")):
        written[f"measurements/{measured.stem}.svg"] = chart.chart(measured)
    return written


def stale() -> list[str]:
    """Return the files that differ from the generated ones."""
    return [
        name
        for name, text in pages().items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text() != text
    ]


def main(argv: list[str]) -> int:
    """Write the pages, or compare them; return the exit code."""
    if argv == ["--check"]:
        for name in (names := stale()):
            print(f"docs/{name} differs from the code: run `make docs`")
        return 1 if names else 0
    for name, text in pages().items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text)
        print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
