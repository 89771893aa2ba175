"""`quire bench`: measures a service under load; with --profile, also shows where the time goes."""

import asyncio
import contextlib
import json
import secrets
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from rich.console import Console
from rich.progress import track
from rich.table import Table

from contract.errors import QuireError
from quire.cli.command_error import CommandError
from quire.cli.settings import BenchSettings
from quire.client import AsyncClient
from quire.client.types import Model, OutputDelta, OutputFinished, SamplingParams
from quire.private_service import PrivateService, ServiceStartError
from rpc.observe import timeline
from rpc.settings import parse_settings

_START_S: Final = 300.0
_POLL_S: Final = 0.1


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(BenchSettings, "quire bench", argv)
    console = Console(highlight=False)
    if settings.profile is not None:
        _check_writable(settings.profile)
    if settings.target:
        _show_load(console, asyncio.run(_load(settings.target, settings)))
        return 0
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name:
        directory = Path(name)
        with _service(settings, directory) as target:
            result = asyncio.run(_load(target, settings))
        _show_load(console, result)
        if settings.profile is not None:
            trace = timeline.merge(directory / "timeline")
            settings.profile.write_text(json.dumps(trace))
            _show_time(console, trace, result)
            console.print(f"timeline: {settings.profile} (open it at ui.perfetto.dev)")
    return 0


@dataclass(frozen=True, slots=True)
class _Result:
    """The measurements of one run of the benchmark; durations are in seconds."""

    began_ns: int
    """When the run began, on the clock of `time.monotonic_ns`, which all processes of a machine
    share."""
    took_s: float
    num_tokens: int
    to_first_token: list[float]
    between_tokens: list[float]


async def _load(target: str, settings: BenchSettings) -> _Result:
    async with AsyncClient(
        target, api_key=settings.api_key.get_secret_value(), tls=settings.client_tls
    ) as client:
        (model, *_) = await _models(client)
        needed = settings.input_len + settings.output_len
        if needed > model.max_model_len:
            raise CommandError(
                f"--input-len and --output-len are {needed} together; the model's context has"
                f" {model.max_model_len} tokens"
            )
        sampling = SamplingParams(temperature=0.0, max_tokens=settings.output_len, ignore_eos=True)
        # All prompts differ, and this run has its own salt, so that the prefix cache never helps.
        salt = secrets.token_hex(8)
        prompts = [
            [(7919 * i + 104729 * j) % model.vocab_size for j in range(settings.input_len)]
            for i in range(1, settings.num_prompts + settings.concurrency + 1)
        ]
        first: list[float] = []
        between: list[float] = []

        async def stream(prompt: list[int]) -> None:
            before, last = time.perf_counter(), None
            async for event in client.generate(prompt, sampling, cache_salt=salt):
                if isinstance(event, OutputFinished) and event.error is not None:
                    raise CommandError(f"a request failed: {event.error.message}")
                if isinstance(event, OutputDelta):
                    now = time.perf_counter()
                    (first if last is None else between).append(now - (last or before))
                    last = now

        warm_up, measured = prompts[: settings.concurrency], prompts[settings.concurrency :]
        await asyncio.gather(*map(stream, warm_up))
        first.clear()
        between.clear()
        left = iter(track(measured, "measuring", console=Console(stderr=True), transient=True))

        async def slot() -> None:
            for prompt in left:  # the slots share this iterator
                await stream(prompt)

        began_ns, began = time.monotonic_ns(), time.perf_counter()
        await asyncio.gather(*(slot() for _ in range(settings.concurrency)))
        took_s = time.perf_counter() - began
    return _Result(began_ns, took_s, settings.num_prompts * settings.output_len, first, between)


def _check_writable(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:
        raise CommandError(f"--profile: {path}: {error.strerror}") from None


async def _models(client: AsyncClient) -> Sequence[Model]:
    for _ in range(int(_START_S / _POLL_S)):
        with contextlib.suppress(QuireError):
            if models := await client.models():
                return models
        await asyncio.sleep(_POLL_S)
    raise CommandError(f"the service is not ready after {_START_S:.0f} s")


@contextlib.contextmanager
def _service(settings: BenchSettings, directory: Path) -> Iterator[str]:
    """Run a service during the `with` block; yield its target."""
    timeline_dir = None if settings.profile is None else directory / "timeline"
    try:
        service = PrivateService({"model": settings.model, "timeline_dir": timeline_dir})
    except ServiceStartError as error:
        raise CommandError(str(error)) from None
    with service:
        yield service.target


def _show_load(console: Console, result: _Result) -> None:
    table = Table("tokens/s", "time to first token", "p99", "between tokens", "p99")
    first, between = sorted(result.to_first_token), sorted(result.between_tokens) or [0.0]
    table.add_row(
        f"{result.num_tokens / result.took_s:,.1f}",
        *(_ms(value) for value in (mean(first), _p99(first), mean(between), _p99(between))),
    )
    console.print(table)


def _show_time(console: Console, trace: dict[str, Any], result: _Result) -> None:
    """Show how much time of the run each process spent in each kind of span."""
    names: dict[int, str] = {}
    spans: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    began_us = result.began_ns / 1e3
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X" and began_us <= event["ts"] <= began_us + result.took_s * 1e6:
            spans[event["pid"], event["name"]].append(event["dur"])
    table = Table(
        "process", "span", "times", "mean", "p99", "share of the run", title="where time goes"
    )
    for (pid, name), durations in sorted(
        spans.items(), key=lambda item: (item[0][0], -sum(item[1]))
    ):
        durations.sort()
        table.add_row(
            names.get(pid, str(pid)),
            name,
            str(len(durations)),
            f"{mean(durations):,.0f} µs",
            f"{_p99(durations):,.0f} µs",
            f"{sum(durations) / (result.took_s * 1e4):.1f} %",
        )
    console.print(table)


def _p99(ascending: Sequence[float]) -> float:
    return ascending[min(len(ascending) - 1, int(0.99 * len(ascending)))]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
