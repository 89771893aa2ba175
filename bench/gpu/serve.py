"""Measures a service of three processes on random weights of one shape.

    python -m gpu.serve --shape 8B --bandwidth 4.1e12 --json out.json    (in bench/, as gpu.sh does)

The benchmark measures, at each concurrency, throughput, time to first token and time between
tokens. It also measures how long the device is idle between decode steps, by the device's own
clock, and the share of the bandwidth that a decode of one sequence reaches. Then comes an open-loop
load: requests of mixed lengths arrive at random, with about --open-share of the tokens per second
of the largest concurrency. Nothing else may use the GPU.
"""

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import aiohttp
from harness.case import Results, arguments, main, numbers, write_json
from harness.closed_loop import LoadResult, Workload, find_model, print_loads, run_load
from harness.open_loop import Arrivals, run_arrivals
from harness.processes import HOST, Service, free_ports, service
from make_model import SHAPES, Sizes, write_shape

from quire.cli.up.service_dir import ended_services, running_services

_POLL_S = 0.25
"""Longer than a step: the worker answers in the interpreter that launches steps."""


async def idle_share(metrics_url: str, num_tokens: int) -> float | None:
    """Return the share of time that the device is idle in the middle of a load, during decodes.

    The share is measured from 40 % to 80 % of the load's `num_tokens`; None if that is too short.
    """
    async with aiohttp.ClientSession() as session:

        async def read() -> tuple[float, float, float]:
            async with session.get(metrics_url) as response:
                text = await response.text()
            names = ("device_busy_seconds_total", "sampled_tokens_total")
            found = (re.search(rf"^quire_worker_{n} (\S+)$", text, re.MULTILINE) for n in names)
            busy_s, sampled = (float(match.group(1)) if match else 0.0 for match in found)
            return asyncio.get_running_loop().time(), busy_s, sampled

        async def when(sampled: float) -> tuple[float, float, float]:
            while (values := await read())[2] < sampled:  # noqa: ASYNC110 - metrics only answer
                await asyncio.sleep(_POLL_S)
            return values

        first = (await read())[2]
        begin_s, busy_before_s, _ = await when(first + 0.4 * num_tokens)
        end_s, busy_after_s, _ = await when(first + 0.8 * num_tokens)
    if end_s - begin_s < 5 * _POLL_S:
        return None
    return 1 - (busy_after_s - busy_before_s) / (end_s - begin_s)


async def measure(given: argparse.Namespace) -> Results:
    """Start, measure and stop the service; write JSON whenever a number is known."""
    sizes = SHAPES[given.shape]
    (worker_port,) = free_ports(1)
    flags = (
        *("--device", given.device, "--kv-cache-memory-gb", str(given.kv_cache_memory_gb)),
        *("--max-num-seqs", str(max(given.concurrency))),
        *("--dtype", "bfloat16" if given.device == "cuda" else "float32"),
        *("--host-kv-memory-gb", "0", "--max-model-len", str(min(sizes.context, 4096))),
    )
    results: dict[str, float] = {}
    started = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-gpu-"))
        model = Path(directory) / given.shape
        write_shape(model, sizes)
        os.environ["QUIRE_LOAD_FORMAT"] = "dummy"  # reaches every worker
        up = (*flags, "--worker-http-port", str(worker_port))
        three = await stack.enter_async_context(service(model, up))
        stack.callback(_keep_logs, given, three)
        await three.wait_until_ready()
        results["ready_s"] = time.perf_counter() - started
        _save(given, results)
        name = await find_model(three.base_url)
        loads: list[LoadResult] = []
        for concurrency in given.concurrency:
            workload = Workload(name, concurrency, given.input_len, given.output_len)
            metrics_url = f"http://{HOST}:{worker_port}/metrics"
            idling = asyncio.create_task(idle_share(metrics_url, concurrency * given.output_len))
            loads.append(load := await run_load(three.base_url, workload, concurrency))
            results |= load.metrics()
            if (idle := await idling) is not None:
                results[f"idle_share_c{concurrency}"] = idle
            if concurrency == 1 and given.bandwidth:
                results["bandwidth_share_c1"] = _bandwidth_share(sizes, load, given)
            _save(given, results)
        print_loads(loads)
        results |= await _open_load(given, three.base_url, name, loads[-1])
        _save(given, results)
    return results


async def _open_load(
    given: argparse.Namespace, base_url: str, model: str, largest: LoadResult
) -> dict[str, float]:
    """Measure random arrivals; return numbers whose names begin with open_.

    A length whose logarithm is uniform between those of a quarter of `len` and of twice `len` has a
    mean of about 0.84 `len`.
    """
    output_len = given.output_len
    arrivals = Arrivals(
        requests_per_s=given.open_share * largest.output_tok_s / (0.84 * output_len),
        duration_s=given.open_s,
        input_lens=(max(1, given.input_len // 4), 2 * given.input_len),
        output_lens=(max(1, output_len // 4), 2 * output_len),
    )
    load = await run_arrivals(base_url, model, arrivals)
    print(f"open loop, {arrivals.requests_per_s:.2f} requests/s: {load}", flush=True)
    names = {name.rpartition("_c")[0]: value for name, value in load.metrics().items()}
    results = {f"open_{name}": value for name, value in names.items()}
    return results | {"open_requests_s": arrivals.requests_per_s}


def _keep_logs(given: argparse.Namespace, service: Service) -> None:
    """Copy the logs of the service's processes beside the JSON, in case they say what failed."""
    if given.json is None:
        return
    for info in (*running_services(), *ended_services()):
        if info.pid == service.pid:
            for log in Path(info.log_dir).glob("*.log"):
                shutil.copyfile(log, given.json.parent / f"{log.stem}.txt")


def _save(given: argparse.Namespace, results: Results) -> None:
    """Write the results so far, in case the rest takes too long."""
    if given.json is not None:
        write_json(given.json, results)


def _bandwidth_share(sizes: Sizes, load: LoadResult, given: argparse.Namespace) -> float:
    """Return the bytes per second that a decode of one sequence reads ÷ the device's bandwidth."""
    context = given.input_len + given.output_len / 2
    num_bytes = 2 * sizes.step_parameters + context * sizes.kv_bytes_per_token(2)
    share: float = num_bytes / (load.tpot_mean_ms / 1e3) / given.bandwidth
    return share


if __name__ == "__main__":
    parser = arguments(__doc__, quick="has no effect")
    add = parser.add_argument
    add("--shape", choices=SHAPES, required=True)
    add("--bandwidth", type=float, default=0.0, help="bytes per second that the device can read")
    add("--device", default="cuda")
    add("--concurrency", type=numbers, default="1,64,256")
    add("--open-share", type=float, default=0.5, help="load of the open loop, of the largest")
    add("--open-s", type=float, default=20.0, help="seconds in which its requests arrive")
    add("--input-len", type=int, default=128)
    add("--output-len", type=int, default=256)
    add("--kv-cache-memory-gb", type=float, default=30.0)
    main(parser.parse_args(), measure)
