"""Draws the frames of `quire top`."""

from collections.abc import Mapping, Sequence
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire.cli.enum_words import enum_word
from quire.cli.top.figures import (
    RouterFigures,
    Snapshot,
    StepRates,
    TierSum,
    device_of,
    largest_sequences,
    rates_between,
    sum_tiers,
)
from quire.client.types import Load
from quire.v1 import common_pb2
from quire.v1.common_pb2 import WorkerActivity
from quire.v1.kv_pb2 import KvTier, SequenceStatus, WorkerKv

_BAR_WIDTH: Final = 48
_MAX_WORKERS: Final = 16
_MIN_SEQUENCES: Final = 3
_STATE_TO_STYLE: Final = {
    "shared": "magenta",
    "held": "blue",
    "pinned": "yellow",
    "cached": "green",
    "free": "bright_black",
}
_SHORT_OF_MEMORY: Final = (common_pb2.MEMORY_LEVEL_WARNING, common_pb2.MEMORY_LEVEL_CRITICAL)
_FREE_SIGN, _SIGN = "░", "█"


def draw(console: Console, title: str, before: Snapshot, now: Snapshot) -> RenderableType:
    """Draw a frame; its last panel lists as many sequences as the console has lines left."""
    rates = rates_between(before, now)
    parts: list[RenderableType] = [
        Text.from_markup(title),
        _panel("service", _service(now, before, rates)),
        _panel("KV blocks", _kv(sum_tiers(now.kv), now.load)),
        _panel("workers", _workers(now, rates)),
    ]
    if now.note:
        parts.append(Text(now.note, style="yellow"))
    num_lines = len(console.render_lines(Group(*parts)))
    room = max(_MIN_SEQUENCES, console.height - num_lines - 4)
    parts.append(_panel("sequences, the largest first", _sequences(now.kv, room)))
    return Group(*parts)


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", box=box.ROUNDED, border_style="dim")


def _service(now: Snapshot, before: Snapshot, rates: Mapping[str, StepRates]) -> RenderableType:
    load = now.load
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        _figure("running", f"{load.num_requests_running} of {load.max_num_seqs}"),
        _figure("waiting", str(load.num_requests_waiting - load.num_requests_swapped)),
        _figure("swapped", str(load.num_requests_swapped)),
        _figure("decoded", f"{sum(it.decode_tokens for it in rates.values()):,.0f} tokens/s"),
        _figure("prompts", f"{sum(it.prefill_tokens for it in rates.values()):,.0f} tokens/s"),
    )
    second = Table.grid(padding=(0, 2))
    second.add_row(*_router(now.router, before.router))
    return Group(grid, second)


def _router(now: RouterFigures | None, before: RouterFigures | None) -> list[Text]:
    if now is None:
        return [Text("latencies and refusals: the router's HTTP address is unknown", style="dim")]
    since = before or now
    first = _mean_ms(
        now.first_token_s - since.first_token_s, now.num_first_tokens - since.num_first_tokens
    )
    between = _mean_ms(
        now.between_tokens_s - since.between_tokens_s,
        now.num_between_tokens - since.num_between_tokens,
    )
    refused = [
        f"{code} {num:,}{_more(num - since.code_to_num_refused.get(code, 0))}"
        for code, num in now.code_to_num_refused.items()
    ]
    return [
        _figure("first token", first),
        _figure("between tokens", between),
        _figure("refused", ", ".join(refused) or "none"),
    ]


def _mean_ms(total_s: float, num: int) -> str:
    return f"{1000 * total_s / num:,.1f} ms" if num > 0 else "-"


def _more(num: int) -> str:
    return f" (+{num:,})" if num > 0 else ""


def _figure(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


def _kv(tiers: Sequence[TierSum], load: Load) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "left", *["right"] * 6):
        grid.add_column(justify=justify)  # type: ignore[arg-type]
    for it in tiers:
        counts = {
            "shared": it.num_shared,
            "held": it.num_held,
            "pinned": it.num_pinned,
            "cached": it.num_cached,
            "free": it.num_free,
        }
        words = [
            Text(f"{num:,} {state}", style=_STATE_TO_STYLE[state]) for state, num in counts.items()
        ]
        grid.add_row(
            enum_word(KvTier.DESCRIPTOR, it.tier),
            bar(counts),
            *words,
            f"{it.num_bytes / 2**20:,.0f} MiB",
        )
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        _figure("fragmentation", f"{load.fragmentation:.0%}"),
        _figure("token occupancy", _share(load.num_slots_written, load.num_slots_held)),
        _figure(
            "prefix cache hits", _share(load.num_prefix_cache_hits, load.num_prefix_cache_queries)
        ),
        _figure("swapped out", f"{load.num_swapped_out_blocks:,}"),
        _figure("in", f"{load.num_swapped_in_blocks:,}"),
        _figure("stored", f"{load.num_stored_blocks:,}"),
        _figure("loaded", f"{load.num_loaded_blocks:,}"),
    )
    return Group(grid, facts)


def bar(state_to_num: Mapping[str, int], width: int = _BAR_WIDTH) -> Text:
    """Draw a bar that shows how many blocks are in each state, such as held, cached and free.

    A state with at least one block gets at least one character.
    """
    whole = sum(state_to_num.values())
    text = Text()
    if not whole:
        return text
    cells = {
        state: max(1, round(width * num / whole)) if num else 0
        for state, num in state_to_num.items()
    }
    while (over := sum(cells.values()) - width) != 0:
        widest = max(cells, key=lambda state: cells[state])
        cells[widest] -= 1 if over > 0 else -1
    for state, num in cells.items():
        text.append((_FREE_SIGN if state == "free" else _SIGN) * num, style=_STATE_TO_STYLE[state])
    return text


def _workers(now: Snapshot, rates: Mapping[str, StepRates]) -> RenderableType:
    table = _table("worker")
    _add_numbers(
        table,
        *("run", "wait", "steps/s", "step ms", "p99", "prompt/s", "decode/s", "busy"),
        *("preempted", "held", "frag", "occup"),
    )
    name_to_kv = {it.worker: it for it in now.kv}
    for it in now.activity[:_MAX_WORKERS]:
        table.add_row(
            _worker_name(it),
            *_worker_cells(it, name_to_kv.get(it.worker), rates.get(it.worker)),
        )
    if len(now.activity) > _MAX_WORKERS:
        table.add_row(f"and {len(now.activity) - _MAX_WORKERS} more")
    return table if now.activity else Text("no figures", style="dim")


def _worker_name(it: WorkerActivity) -> Text:
    name = Text(_shorten(it.worker))
    if it.is_unloaded:
        name.append(" unloaded", style="yellow")
    if it.memory_level in _SHORT_OF_MEMORY:
        name.append(
            f" memory {enum_word(common_pb2.MemoryLevel.DESCRIPTOR, it.memory_level)}", style="red"
        )
    return name


def _worker_cells(it: WorkerActivity, kv: WorkerKv | None, rates: StepRates | None) -> list[str]:
    if it.is_unloaded:
        return []
    device = None if kv is None else device_of(kv)
    held = "-" if device is None else _share(device.num_held + device.num_shared, device.num_blocks)
    durations = sorted(step.execute_s for step in it.steps)
    preempted = f"{it.num_preemptions:,}"
    if rates is not None and rates.preemptions:
        preempted += f" ({rates.preemptions:,.1f}/s)"
    return [
        str(it.load.num_requests_running),
        str(it.load.num_requests_waiting),
        "-" if rates is None else f"{rates.steps:,.1f}",
        _quantile_ms(durations, 0.5),
        _quantile_ms(durations, 0.99),
        "-" if rates is None else f"{rates.prefill_tokens:,.0f}",
        "-" if rates is None else f"{rates.decode_tokens:,.0f}",
        "-" if rates is None else f"{rates.busy:.0%}",
        preempted,
        held,
        f"{it.load.fragmentation:.0%}",
        _share(it.load.num_slots_written, it.load.num_slots_held),
    ]


def _quantile_ms(values: Sequence[float], share: float) -> str:
    """Return the quantile `share` of ascending durations in seconds, as text in milliseconds."""
    return f"{1000 * values[int(share * (len(values) - 1))]:.1f}" if values else "-"


def _sequences(workers: Sequence[WorkerKv], room: int) -> RenderableType:
    table = _table("request", "status")
    _add_numbers(table, "output", "tokens", "prompt", "cached", "device", "host", "disk", "shared")
    several = len(workers) > 1
    if several:
        table.add_column("worker")
    sequences = largest_sequences(workers)
    for worker, seq in sequences[:room]:
        numbers = (
            seq.output_index,
            seq.num_tokens,
            seq.num_prompt_tokens,
            seq.num_cached_tokens,
            seq.num_device_blocks,
            seq.num_host_blocks,
            seq.num_disk_blocks,
            seq.num_shared_blocks,
        )
        where = [escape(_shorten(worker))] if several else []
        table.add_row(
            escape(seq.request_id),
            enum_word(SequenceStatus.DESCRIPTOR, seq.status),
            *map(str, numbers),
            *where,
        )
    return table if sequences else Text("none", style="dim")


def _table(*left: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    return table


def _add_numbers(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def _shorten(target: str) -> str:
    """Keep only a socket's file name, because all workers of a service share the directory."""
    return target.rpartition("/")[2] if target.startswith("unix:") else target


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
