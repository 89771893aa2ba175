"""The table of a call: the numbers of every part, and which goals were met."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from harness.machine import machine_facts


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a part."""

    name: str
    seconds: float
    error: str | None
    """Why the part failed; None: it did not. Some results may exist even if it failed."""
    results: dict[str, Any]
    """The results in each file that the part wrote, by the file's name."""


@dataclass(frozen=True, slots=True)
class Target:
    """A goal: where its number is in the results, and the number's bound."""

    text: str
    part: str
    number: str
    bound: float
    is_upper: bool = False


TARGETS: Final = (
    Target("tokens in float32 that differ", "exact", "wrong_float32", 0, is_upper=True),
    Target("compilations after the warm-up", "engine", "compiled_after_warm_up", 0, is_upper=True),
    *(
        Target(f"{shape}: idle between decode steps, batch {batch}", f"serve {shape}",
               f"idle_share_c{batch}", 0.01, is_upper=True)
        for shape, batches in (("1B", (1, 64)), ("8B", (1, 64, 256)))
        for batch in batches
    ),
    Target("1B: bandwidth of a decode at batch 1", "serve 1B", "bandwidth_share_c1", 0.75),
    Target("8B: bandwidth of a decode at batch 1", "serve 8B", "bandwidth_share_c1", 0.85),
    *(
        Target(f"8B: service ÷ bare engine, batch {batch}", "ratios",
               f"service_over_engine_{batch}", 0.95)
        for batch in (1, 64, 256)
    ),
    Target("1B: ÷ transformers' continuous batching", "ratios", "over_continuous_batching", 5.0),
    Target("swap ÷ pinned memcpy", "swap", "payload_over_memcpy", 0.95),
    Target("decode slowdown while swapping", "swap", "decode_slowdown", 0.02, is_upper=True),
    Target("tokens that differ after resizes", "elastic", "wrong", 0, is_upper=True),
)  # fmt: skip


def write(outcomes: list[Outcome], out: Path) -> None:
    """Write the outcomes so far."""
    result = {"about": machine_facts(), "parts": [asdict(outcome) for outcome in outcomes]}
    (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")


def table(outcomes: list[Outcome]) -> str:
    """Return all numbers by part, then which goals were met."""
    lines = ["  ".join(f"{name} {value}" for name, value in machine_facts().items())]
    for outcome in outcomes:
        state = "ok" if outcome.error is None else f"FAILED {outcome.error}"
        lines.append(f"\n{outcome.name} ({outcome.seconds:.0f} s): {state}")
        for file, numbers in outcome.results.items():
            if file == "kernels":
                lines += _kernel_lines(numbers)
            elif isinstance(numbers, dict):
                lines += _number_lines(numbers)
            else:
                lines += [f"  {line}" for line in numbers]
    found = {outcome.name: outcome.results.get("numbers", {}) for outcome in outcomes}
    if ratios := _ratios(found):
        found["ratios"] = ratios
    lines.append("\ntargets")
    for target in TARGETS:
        if target.part not in found:
            continue
        value = found[target.part].get(target.number)
        sign = "≤" if target.is_upper else "≥"
        state = "not measured"
        if isinstance(value, int | float):
            is_met = value <= target.bound if target.is_upper else value >= target.bound
            state = f"{value:.3f} {'met' if is_met else 'MISSED'}"
        lines.append(f"  {target.text:<44} {sign} {target.bound:<5} {state}")
    return "\n".join(lines)


def _ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return ratios between numbers of different parts."""
    ratios = {}
    batching = found.get("transformers 1B", {}).get("continuous_batching_tok_s_c64")
    ours = found.get("serve 1B", {}).get("output_tok_s_c64")
    if isinstance(batching, float) and ours:
        ratios["over_continuous_batching"] = ours / batching
    for streams in (1, 64, 256):
        served = found.get("serve 8B", {}).get(f"output_tok_s_c{streams}")
        rows = found.get("engine loads", {}).get("rows", {})
        bare = rows.get(f"{streams} streams", {}).get("output_tok_s")
        if served and bare:
            ratios[f"service_over_engine_{streams}"] = served / bare
    return ratios


def _number_lines(numbers: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in numbers.items():
        if name == "rows":
            lines += [
                f"  {row:<44} {'  '.join(f'{key} {_text(each)}' for key, each in of.items())}"
                for row, of in value.items()
            ]
        elif name not in ("machine", "kernels"):
            lines.append(f"  {name:<32} {_text(value)}")
    return lines


def _kernel_lines(result: dict[str, Any]) -> list[str]:
    bandwidth, flops = result["ceilings"]["bytes_per_s"], result["ceilings"]["flops"]
    device = result["device"]
    lines = [f"  {device}: {bandwidth / 1e9:,.0f} GB/s, {flops / 1e12:,.0f} TFLOP/s"]
    for row in result["rows"]:
        rate = row["error"] or f"{row['us']:10,.1f} us  {row['share']:.3f} of {row['bound']}"
        others = row["baselines_us"] or {}
        beside = "  ".join(f"{name} {_text(value)}" for name, value in others.items())
        lines.append(f"  {row['kernel']:<16} {row['shape']:<44} {rate}  {beside}")
    return lines


def _text(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
