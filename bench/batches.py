"""Measures how a batch delays the tokens of interactive streams.

    python bench/batches.py

A simulated device serves 64 streams; when one ends, a new one follows. In each round, the streams
first run alone, and then beside a part of a batch of 10,000 lines. `p99_ratio` is the p99 of the
time between a stream's tokens beside the batch, divided by the p99 alone, in the same round.
`answered` counts the lines of the batch that were answered. The benchmark takes about four minutes;
the machine should be idle otherwise.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from harness.case import SHIPPED_MODEL, BenchError, Results, Table, arguments, main
from harness.closed_loop import post_stream
from harness.processes import modules
from harness.turns import Spread

_INPUT_LEN = 16
_OUTPUT_LEN = 200
_LINE_LEN = 16
_POLL_S = 0.5
_SETTLE_S = 3.0
_ENDPOINT = "/v1/completions"
_SPEEDUP = 0.2
"""Steps take 25 ms, as with a model of 40 billion parameters, so the control plane has spare
time."""


class Streams:
    """Keeps streams running, and notes the times between their pieces."""

    def __init__(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        self._session = session
        self._chance = chance
        self.gaps: list[float] = []

    @asynccontextmanager
    async def running(self, num: int) -> Any:
        tasks = [asyncio.create_task(self._follow_each_other()) for _ in range(num)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow_each_other(self) -> None:
        await asyncio.sleep(self._chance.random())
        while True:
            last: list[float] = []

            def note(last: list[float] = last) -> None:
                now = time.perf_counter()
                if last:
                    self.gaps.append(now - last.pop())
                last.append(now)

            output_len = self._chance.randrange(_OUTPUT_LEN // 2, 3 * _OUTPUT_LEN // 2)
            asked = _completion(self._chance, _INPUT_LEN, output_len) | {"stream": True}
            await post_stream(self._session, json.dumps(asked).encode(), note)

    async def p99(self, during: "asyncio.Task[Any]") -> float:
        """Return the p99 of the gaps between pieces while a task runs."""
        self.gaps.clear()
        await during
        return float(np.percentile(self.gaps, 99))


def _completion(chance: random.Random, input_len: int, output_len: int) -> dict[str, Any]:
    prompt = [chance.randrange(2, 4000) for _ in range(input_len)]
    return {"prompt": prompt, "max_tokens": output_len, "ignore_eos": True}


async def answer_batch(session: aiohttp.ClientSession, chance: random.Random, num: int) -> int:
    """Answer a batch of `num` lines; return how many were answered."""
    lines = [
        json.dumps(
            {
                "custom_id": str(i),
                "method": "POST",
                "url": _ENDPOINT,
                "body": _completion(chance, _LINE_LEN, _LINE_LEN),
            }
        )
        for i in range(num)
    ]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(lines), filename="in.jsonl")
    async with session.post("/v1/files", data=form) as response:
        file = await response.json()
    asked = {"input_file_id": file["id"], "endpoint": _ENDPOINT, "completion_window": "24h"}
    async with session.post("/v1/batches", json=asked) as response:
        batch = await response.json()
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(_POLL_S)
        async with session.get(f"/v1/batches/{batch['id']}") as response:
            batch = await response.json()
    if batch["status"] != "completed":
        raise BenchError(f"the batch is {batch['status']}: {batch['errors']}")
    return int(batch["request_counts"]["completed"])


async def measure(given: argparse.Namespace) -> Results:
    chance = random.Random(0)
    answered = 0
    alone: list[float] = []
    beside: list[float] = []
    table = Table(
        "round:d", "p99 alone, ms:.2f", "beside the batch:.2f", "ratio:.3f", "lines/s:.0f"
    )
    with tempfile.TemporaryDirectory(prefix="quire-batches-") as name:
        model = f"--model={SHIPPED_MODEL}"
        module_to_flags: dict[str, Sequence[str]] = {
            "sim_worker": (model, f"--speedup={given.speedup}", f"--num-blocks={given.num_blocks}"),
            "scheduler_svc": (f"--workers=unix:{name}/sim_worker.sock",),
            "router": (
                *(model, f"--scheduler=unix:{name}/scheduler_svc.sock"),
                f"--turn-store={name}/turns.sqlite",
            ),
        }
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            modules(Path(name), module_to_flags) as processes,
            aiohttp.ClientSession(processes["router"].base_url, timeout=timeout) as session,
        ):
            streams = Streams(session, chance)
            async with streams.running(given.streams):
                await asyncio.sleep(_SETTLE_S)
                for number in range(given.rounds):
                    alone.append(await streams.p99(asyncio.create_task(asyncio.sleep(given.alone))))
                    num = given.lines // given.rounds
                    started = time.perf_counter()
                    batch = asyncio.create_task(answer_batch(session, chance, num))
                    beside.append(await streams.p99(batch))
                    answered += batch.result()
                    took_s = time.perf_counter() - started
                    table.row(
                        number, alone[-1] * 1e3, beside[-1] * 1e3, beside[-1] / alone[-1],
                        num / took_s,
                    )  # fmt: skip
    ratio = Spread.of_ratios(beside, alone)
    print(f"p99 ratio {ratio}; {answered} lines answered")
    return {"answered": answered, **ratio.metrics("p99_ratio")}


def _parse() -> argparse.Namespace:
    parser = arguments(__doc__, quick="200 lines in one round")
    add = parser.add_argument
    add("--lines", type=int, help="lines of the batch in all; default: 10,000")
    add("--rounds", type=int, help="parts of the batch; default: 5")
    add("--streams", type=int, default=64, help="interactive streams")
    add("--alone", type=float, default=20.0, metavar="S", help="how long streams run alone")
    add("--speedup", type=float, default=_SPEEDUP, help="speed factor of the simulated device")
    add("--num-blocks", type=int, default=26_000, help="blocks of the device's KV memory")
    given = parser.parse_args()
    given.lines = given.lines or (200 if given.quick else 10_000)
    given.rounds = given.rounds or (1 if given.quick else 5)
    if given.quick:
        given.alone = 2.0
    return given


if __name__ == "__main__":
    given = _parse()
    results = main(given, measure)
    if results["answered"] != given.lines:
        sys.exit(f"{results['answered']} lines were answered, not {given.lines}")
