"""`python -m docs.generate` writes docs/reference, charts and deploy/kubernetes.

With --check it only compares.
"""

import sys
from pathlib import Path

from docs.generate import chart, flags, manifests, metrics, routes, rpcs

ROOT = Path(__file__).parents[2]
MEASUREMENTS = "docs/measurements"
NOTICE = "<!-- Written by `make docs` from the code; change it there. -->\n"


def pages() -> dict[str, str]:
    """Return the text of each generated file, by its path below the root."""
    reference = {
        "docs/reference/flags.md": flags.page(),
        "docs/reference/metrics.md": metrics.page(),
        "docs/reference/rpcs.md": rpcs.page(ROOT / "protos"),
        "docs/reference/http.md": routes.page(),
    }
    written = {name: f"{NOTICE}{text.rstrip()}\n" for name, text in reference.items()}
    for measured in sorted((ROOT / MEASUREMENTS).glob("*.json")):
        written[f"{MEASUREMENTS}/{measured.stem}.svg"] = chart.chart(measured)
    if manifests.HELM is not None:
        written["deploy/kubernetes/cpu-demo.yaml"] = manifests.page("cpu-demo")
    return written


def stale() -> list[str]:
    """Return the files that differ from the generated ones."""
    return [
        name
        for name, text in pages().items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text() != text
    ]


def main(argv: list[str]) -> int:
    """Write the pages, or compare them; return the exit code."""
    if argv == ["--check"]:
        for name in (names := stale()):
            print(f"{name} differs from the code: run `make docs`")
        return 1 if names else 0
    for name, text in pages().items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_text(text)
        print(name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
