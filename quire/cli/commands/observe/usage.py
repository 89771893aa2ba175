"""`quire usage`: counts past requests and their tokens by time, tenant, key, model and adapter."""

import json
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quire.cli.command_error import CommandError
from quire.cli.commands.live.requests import calling_operator
from quire.cli.settings import UsageSettings
from quire.cli.target import find_operator_targets
from quire.v1 import requests_pb2
from rpc.settings import parse_settings

_UNIT_TO_S: Final = {"m": 60, "h": 3600, "d": 86400}
_TIMES: Final = ("hour", "day")
_SUMS: Final = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "reasoning_tokens",
)


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(UsageSettings, "quire usage", argv)
    asked = requests_pb2.ReadUsageRequest(
        since=unix_time(settings.since, "--since", time.time()),
        until=unix_time(settings.until, "--until", time.time()) if settings.until else None,
        by=settings.by,
    )
    target = find_operator_targets(settings)[0]  # a service's routers share the store
    with calling_operator(settings, target) as (stub, metadata):
        rows = stub.ReadUsage(asked, metadata=metadata).rows
    shown = [[_shown(row, name) for name in settings.by] for row in rows]
    if settings.json_:
        for row, group in zip(rows, shown, strict=True):
            sums = {name: getattr(row, name) for name in _SUMS}
            print(json.dumps({**dict(zip(settings.by, group, strict=True)), **sums}))
        return 0
    table = Table(box=None, pad_edge=False)
    for name in settings.by:
        table.add_column(name, no_wrap=True)
    for name in _SUMS:
        table.add_column(name.removesuffix("_tokens"), justify="right", no_wrap=True)
    for row, group in zip(rows, shown, strict=True):
        table.add_row(*map(escape, group), *(f"{getattr(row, name):,}" for name in _SUMS))
    Console(highlight=False).print(table)
    return 0


def unix_time(text: str, flag: str, now: float) -> float:
    """Return the Unix time of `text`, the value of `flag`: a time, or an age before `now`.

    Raises:
        CommandError: `text` is neither a time nor an age.
    """
    if ago := re.fullmatch(r"(\d{1,9})([mhd])", text):
        return max(0.0, now - int(ago[1]) * _UNIT_TO_S[ago[2]])
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(
            f"{flag} is {text!r}; it must be like 90m, 24h, 30d, 2026-11-01 or 2026-11-01T08:00"
        ) from None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _shown(row: requests_pb2.UsageRow, name: str) -> str:
    value = getattr(row, name)
    if name in _TIMES:
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%MZ")
    return str(value)
