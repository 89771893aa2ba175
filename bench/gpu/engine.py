"""Measures the engine without a service: milliseconds per step, and compilations after warm-up.

    python -m gpu.engine --shape 8B --json out.json    (in bench/, as gpu.sh does)
    python -m gpu.engine --shape 8B --loads 1,64,256 --traces DIR --json out.json

The executor has random weights, and is built, captured and warmed up as in a worker. The steps are
decodes of some sequences over some contexts, decodes beside a prompt, and decodes with top-p. All
run with graphs and eagerly. `ms` is the time per step with two steps in flight, `launch_ms` the
host's time to launch a step, and `device_ms` the device's time. `compiled` lists kernels that
Triton had to compile or read from the disk after the warm-up: there must be none.

With --loads, the benchmark instead runs so many sequences from prompt to end: their output tokens
per second are the limit of a service with as many clients. With --traces, it also profiles three
steps of each of three kinds.
"""

import argparse
import functools
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gpu.bare_engine import (
    TOP_P,
    BareEngine,
    Driver,
    Step,
    capture,
    closed_load,
    make_engine,
    step_ms,
    traced,
)
from gpu.compilations import Compilations
from gpu.rows import Rows
from harness.case import Results, arguments, main, numbers
from make_model import SHAPES

_MIXED = (128, 512, 2048)
_TRACED = 3


def kinds_of_steps(given: argparse.Namespace) -> list[Step]:
    """Return the steps to measure, the most telling first."""
    rows, contexts = given.rows, given.contexts
    decodes = [Step(num, context) for context in contexts for num in rows]
    beside = min(64, max(rows))
    mixed = [Step(beside, contexts[0], num) for num in given.prompts]
    drawn = [Step(num, contexts[0], sampling=TOP_P) for num in rows]
    return [*decodes, *mixed, *drawn]


def measure(given: argparse.Namespace) -> Results:
    device = torch.device(given.device)
    table = Rows(given.json)
    started = time.perf_counter()
    most = max(*given.rows, *given.loads, 1)
    engine = make_engine(
        SHAPES[given.shape],
        device,
        max_num_seqs=most + 1,
        max_num_batched_tokens=max(given.step_tokens, most + 1),
        kv_gb=given.kv_gb,
    )
    load_s = time.perf_counter() - started

    def begin() -> Mapping[str, Any]:
        return {"load_s": load_s} | capture(engine, device)

    table.start(begin)
    compiled: list[str] = []
    if given.loads:
        for streams in given.loads:
            load = functools.partial(
                closed_load, engine.graphs, engine.limits, streams, *given.lens
            )
            table.run(f"{streams} streams", load)
    else:
        compiled = _steps(given, engine, device, table)
    if given.traces is not None:
        given.traces.mkdir(parents=True, exist_ok=True)
        for step in (
            Step(min(64, max(given.rows)), given.contexts[0]),
            Step(min(64, max(given.rows)), given.contexts[0], given.prompts[-2]),
            Step(0, 0, given.prompts[-1]),
        ):
            table.run(f"trace of {step.name}", functools.partial(_trace, given, engine, step))
    results = {"compiled_after_warm_up": len(compiled), "compiled": compiled}
    table.write(**results)
    return results | {"rows": table.rows}


def _steps(
    given: argparse.Namespace, engine: BareEngine, device: torch.device, table: Rows
) -> list[str]:
    compiled = []
    for kind, executor in (("graphs", engine.graphs), ("eager", engine.eager)):
        for step in kinds_of_steps(given):

            def row(step: Step = step, executor: Any = executor) -> Mapping[str, Any]:
                with Compilations() as found:
                    times = step_ms(executor, engine.limits, step, device, given.steps)
                return times | ({"compiled": found.kernels} if found.kernels else {})

            engine.reset()
            table.run(f"{kind}, {step.name}", row)
            compiled = [name for of in table.numbers("compiled").values() for name in of]
            table.write(compiled_after_warm_up=len(compiled), compiled=compiled)
    return compiled


def _trace(given: argparse.Namespace, engine: BareEngine, step: Step) -> Mapping[str, Any]:
    device = torch.device(given.device)
    driver = Driver(engine.graphs, engine.limits, step, 2 * _TRACED)
    driver.run(_TRACED)
    name = step.name.replace(" ", "_").replace("+", "and")
    with traced(given.traces / f"{name}.json.gz", device):
        driver.run(_TRACED)
    engine.reset()
    return {"file": f"{name}.json.gz"}


if __name__ == "__main__":
    parser = arguments(__doc__, quick="five steps of each kind")
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="8B")
    add("--device", default="cuda:0")
    add("--rows", type=numbers, default=(1, 64, 256, 8), help="sequences that decode")
    add("--contexts", type=numbers, default=(256, 4096))
    add("--prompts", type=numbers, default=_MIXED, help="prompt tokens beside 64 decodes")
    add("--steps", type=int, default=20, help="measured steps of each kind")
    add("--step-tokens", type=int, default=4096, help="the limit on tokens of a step")
    add("--kv-gb", type=float, default=36.0, help="KV memory")
    add("--loads", type=numbers, default=(), help="sequences from prompt to end; no steps then")
    add("--lens", type=numbers, default=(128, 256), help="tokens of a load's prompt and output")
    add("--traces", type=Path, metavar="DIR", help="write a profile of three steps of each kind")
    given = parser.parse_args()
    if given.quick:
        given.steps = 5
    with torch.inference_mode():
        results = main(given, measure)
    failed = any("error" in row for row in results["rows"].values())
    sys.exit(1 if results["compiled_after_warm_up"] or failed else 0)
