"""Draws docs/measurements/*.json as bar charts: Quire beside a peer, one panel per metric."""

import json
from html import escape
from pathlib import Path
from typing import Any

_WIDTH, _PANEL, _BAR, _GAP, _TOP = 760, 240, 14, 14, 54
_COLOURS = ("#3b6fb6", "#b9bec7", "#d9a441", "#8a9b6e")
_PANELS = (
    ("output_tokens_per_s", "output tokens/s (more is better)"),
    ("ttft_ms", "mean time to first token, ms (less)"),
    ("p99_itl_ms", "p99 between tokens, ms (less)"),
)
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}"
    ".name{font-weight:600}"
    "@media(prefers-color-scheme:dark){text{fill:#c9d1d9}}"
)


def chart(measured: Path) -> str:
    """Return the SVG of one file of measurements."""
    data = json.loads(measured.read_text())
    servers, rows = data["servers"], data["rows"]
    group = len(servers) * _BAR + _GAP
    height = _TOP + len(rows) * group + 24
    label, box = escape(_title(data)), f"0 0 {_WIDTH} {height}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" aria-label="{label}">',
        f"<style>{_STYLE}</style>",
    ]
    x = 10
    for name, colour in zip(servers, _COLOURS, strict=False):
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text class="name" x="{x + 18}" y="18">{escape(name)}</text>')
        x += 110
    for number, (field, title) in enumerate(_PANELS):
        parts += _panel(10 + number * (_PANEL + 10), field, title, rows)
    parts.append(f'<text x="10" y="{height - 6}">{escape(_title(data))}</text></svg>')
    return "\n".join(parts) + "\n"


def _title(data: dict[str, Any]) -> str:
    return f"{data['cpu']}, {data['date']}: {data['what'].split(';')[0]}"


def _panel(left: int, field: str, title: str, rows: list[dict[str, Any]]) -> list[str]:
    most = max(max(row[field]) for row in rows)
    room = _PANEL - 118
    parts = [f'<text x="{left}" y="42">{escape(title)}</text>']
    y = _TOP
    for row in rows:
        middle = y + len(row[field]) * _BAR / 2 + 4
        label = f"{row['streams']} stream{'s' * (row['streams'] != 1)}"
        parts.append(f'<text x="{left}" y="{middle:.0f}">{label}</text>')
        for value, colour in zip(row[field], _COLOURS, strict=False):
            width = max(1, round(room * value / most))
            parts.append(
                f'<rect x="{left + 74}" y="{y}" width="{width}" height="{_BAR - 2}" '
                f'fill="{colour}"/><text x="{left + 78 + width}" y="{y + 10}">{value:,g}</text>'
            )
            y += _BAR
        y += _GAP
    return parts
