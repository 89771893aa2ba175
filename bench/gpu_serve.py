"""Measures three processes on random weights of one shape, and the same service in one process.

    python bench/gpu_serve.py --shape 8B --bandwidth 4.1e12 --json out.json

Throughput, time to first token and between tokens at each concurrency; how long the device idles
between decode steps, by its own clock; which share of the bandwidth a decode of one sequence gets;
and what three processes produce against one (`split.py`).
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import aiohttp
import uvloop
from gpu_shapes import SHAPES, Shape, write_model
from load import LoadResult, Workload, find_model, format_table, run_load
from processes import one_service, service
from split import GRPC, ONE_GRPC, by_grpc, measure_split

from quire.cli.up import ports

_POLL_S = 0.02
_HOST = "127.0.0.1"


class DecodeWindow:
    """Watches a worker's metrics while a load runs, in the middle of which only decodes run."""

    def __init__(self, metrics_url: str, num_tokens: int) -> None:
        """`num_tokens`: how many the load will sample."""
        self._url = metrics_url
        self._num_tokens = num_tokens

    async def idle_share(self) -> float | None:
        """Wait until 40 % of the tokens have come, then 80 %; None: it was too short to tell."""
        async with aiohttp.ClientSession() as session:
            first = await self._read(session)
            begin = await self._when(session, first["sampled"] + 0.4 * self._num_tokens)
            end = await self._when(session, first["sampled"] + 0.8 * self._num_tokens)
        if end["at_s"] - begin["at_s"] < 5 * _POLL_S:
            return None
        busy_s = end["busy"] - begin["busy"]
        return 1 - busy_s / (end["at_s"] - begin["at_s"])

    async def _when(self, session: aiohttp.ClientSession, sampled: float) -> dict[str, float]:
        # A process tells its metrics, and when they change, only to who asks.
        while (values := await self._read(session))["sampled"] < sampled:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return values

    async def _read(self, session: aiohttp.ClientSession) -> dict[str, float]:
        async with session.get(self._url) as response:
            text = await response.text()
        found = {
            name: float(match.group(1))
            for name, metric in (
                ("busy", "quire_worker_device_busy_seconds_total"),
                ("sampled", "quire_worker_sampled_tokens_total"),
            )
            if (match := re.search(rf"^{metric} (\S+)$", text, re.MULTILINE))
        }
        return {"at_s": asyncio.get_running_loop().time(), **found}


async def measure(given: argparse.Namespace) -> None:
    """Start, measure and stop everything, and write names with their numbers."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    shape: Shape = SHAPES[given.shape]
    worker_port = ports.prefer(_HOST, 0, ())
    flags = (
        *("--device", given.device, "--kv-cache-memory-gb", str(given.kv_cache_memory_gb)),
        *("--max-num-seqs", str(max(given.concurrency))),
        *("--dtype", "bfloat16" if given.device == "cuda" else "float32"),
        *("--host-kv-memory-gb", "0", "--max-model-len", str(min(shape.context, 4096))),
    )
    numbers: dict[str, float] = {}

    def save() -> None:  # what is known counts, should the rest take too long
        given.json.write_text(json.dumps(numbers, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="quire-gpu-") as temporary:
        model = Path(temporary) / given.shape
        write_model(model, shape)
        async with contextlib.AsyncExitStack() as stack:
            os.environ["QUIRE_LOAD_FORMAT"] = "dummy"  # reaches every worker
            up = (*flags, "--worker-http-port", str(worker_port))
            started = await stack.enter_async_context(service(model, up))
            one = await stack.enter_async_context(one_service(model, flags))
            await asyncio.gather(started.wait_until_ready(), one.wait_until_ready())
            turns = {ONE_GRPC: by_grpc(one), GRPC: by_grpc(started)}
            name = await find_model(started.base_url)
            loads: list[LoadResult] = []
            metrics_url = f"http://{_HOST}:{worker_port}/metrics"
            for concurrency in given.concurrency:
                workload = Workload(name, concurrency, given.input_len, given.output_len)
                window = DecodeWindow(metrics_url, concurrency * given.output_len)
                idling = asyncio.create_task(window.idle_share())
                loads.append(await run_load(started.base_url, workload, concurrency))
                idle = await idling
                numbers |= _numbers(loads[-1], idle)
                if concurrency == 1 and given.bandwidth:
                    numbers["bandwidth_share_c1"] = _bandwidth_share(shape, loads[-1], given)
                save()
            print(format_table(loads), flush=True)
            for concurrency in given.split_concurrency:
                num_prompts = max(2, concurrency)
                workload = Workload(name, num_prompts, given.input_len, given.output_len // 2)
                tax = await measure_split(
                    turns, workload, concurrency, given.split_rounds, lambda _: None
                )
                print(tax.table(), flush=True)
                measured = tax.metrics()
                numbers |= {
                    f"three_over_one_c{concurrency}": measured["split_ratio"],
                    f"one_process_tok_s_c{concurrency}": measured["split_one_grpc_tok_s"],
                }
                save()


def _numbers(load: LoadResult, idle_share: float | None) -> dict[str, float]:
    suffix = f"c{load.concurrency}"
    numbers = {
        f"output_tok_s_{suffix}": load.output_tok_s,
        f"ttft_ms_{suffix}": load.ttft_mean_ms,
        f"tpot_ms_{suffix}": load.tpot_mean_ms,
        f"itl_p99_ms_{suffix}": load.itl_p99_ms,
    }
    if idle_share is not None:
        numbers[f"idle_share_{suffix}"] = idle_share
    return numbers


def _bandwidth_share(shape: Shape, load: LoadResult, given: argparse.Namespace) -> float:
    """Of the bytes per second that the device can read, what a decode of one sequence reads."""
    context = given.input_len + given.output_len / 2
    num_bytes = 2 * shape.step_parameters + context * shape.kv_bytes_per_token(2)
    share: float = num_bytes / (load.tpot_mean_ms / 1e3) / given.bandwidth
    return share


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=SHAPES, required=True)
    add("--bandwidth", type=float, default=0.0, help="bytes per second that the device can read")
    add("--device", default="cuda")
    add("--concurrency", default="1,32,256")
    add("--split-concurrency", default="1,256")
    add("--split-rounds", type=int, default=2)
    add("--input-len", type=int, default=128)
    add("--output-len", type=int, default=256)
    add("--kv-cache-memory-gb", type=float, default=12.0)
    add("--json", type=Path, required=True)
    given = parser.parse_args()
    for name in ("concurrency", "split_concurrency"):
        setattr(given, name, tuple(map(int, getattr(given, name).split(","))))
    return given


def _main() -> None:
    given = _parse()
    try:
        uvloop.run(measure(given))
    except (RuntimeError, aiohttp.ClientError) as error:
        sys.exit(f"gpu_serve.py: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):  # what was started has ended
        sys.exit(130)


if __name__ == "__main__":
    _main()
