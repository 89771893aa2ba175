"""Measures a whole service: throughput, latency, and what the split into processes costs.

Starts router, scheduler and worker on a 125M Llama with random weights, loads their OpenAI face
with 1, 8 and 32 streams of 128 tokens in and 64 out, then lets them take turns with the same
service in one process (see one_service.py), and with its engine alone (see bare_engine.py). The
client is a process of its own on the same machine. Where cores are few, all compete: what face and
client take is seen in both services, and not in the engine alone. --base-url measures a server that
is up already, and no tax. --peer URL lets another OpenAI-shaped server of the same model take turns
with ours; see peer.py.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import uvloop
from load import Workload, find_model
from peer import Loads, measure_loads
from processes import bare_engine, make_model, one_service, service
from shares import measure_shares
from split import ENGINE, GRPC, HTTP, ONE_GRPC, ONE_HTTP, by_grpc, by_http, measure_split

_WAVES = 4
"""Prompts of each stream in a round; with --quick 1."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    quick: bool
    json: Path | None
    model: Path | None
    concurrency: tuple[int, ...]
    input_len: int
    output_len: int
    num_threads: int
    device: str
    kv_cache_memory_gb: float
    split_concurrency: int
    split_rounds: int
    base_url: str | None
    peer: str | None
    rounds: int


_START = time.monotonic()


def _report(line: str) -> None:
    print(f"[{time.monotonic() - _START:5.1f} s] {line}", file=sys.stderr, flush=True)


async def measure(options: Options) -> dict[str, float]:
    """Measure what the options ask for, print it, and give it as names to numbers."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if options.base_url is not None:
        return (await _measure_loads(options, options.base_url)).metrics()
    with tempfile.TemporaryDirectory(prefix="quire-bench-model-") as temporary:
        model = options.model
        if model is None:
            model = Path(temporary) / "llama-125m"
            _report("making a model …")
            await make_model(model)
        return await _measure_processes(options, model)


async def _measure_processes(options: Options, model: Path) -> dict[str, float]:
    worker_flags = (
        *("--num-threads", str(options.num_threads)),
        *("--kv-cache-memory-gb", str(options.kv_cache_memory_gb)),
        *("--device", options.device),
    )
    _report("starting the processes …")
    async with contextlib.AsyncExitStack() as stack:
        started = await stack.enter_async_context(service(model, worker_flags))
        one = await stack.enter_async_context(one_service(model, worker_flags))
        engine = await stack.enter_async_context(bare_engine(model, worker_flags))
        await asyncio.gather(*(each.wait_until_ready() for each in (started, one, engine)))
        _report("the three processes, the one, and the engine are ready")
        loads = await _measure_loads(options, started.base_url)
        metrics = loads.metrics()
        name = await find_model(started.base_url)
        if not options.quick:
            alone = next((load for load in loads.ours if load.concurrency == 1), None)
            metrics |= await measure_shares(
                started.base_url, name, model, alone, options.num_threads
            )
        concurrency = options.split_concurrency
        workload = _workload(options, name, concurrency)
        if options.quick:  # there is time for two short rounds, or for one
            workload = replace(workload, output_len=-(-workload.output_len // 2))
        turns = {
            ENGINE: engine.output_tok_s,
            ONE_GRPC: by_grpc(one),
            GRPC: by_grpc(started),
            ONE_HTTP: by_http(one),
            HTTP: by_http(started),
        }
        tax = await measure_split(turns, workload, concurrency, options.split_rounds, _report)
        print(f"\n{tax.table()}", flush=True)
        _report("stopping the processes …")
    return metrics | tax.metrics()


async def _measure_loads(options: Options, base_url: str) -> Loads:
    model = await find_model(base_url)
    workloads = [(each, _workload(options, model, each)) for each in options.concurrency]
    loads = await measure_loads(base_url, options.peer, workloads, options.rounds, _report)
    print(f"{options.input_len} tokens in, {options.output_len} out, {os.cpu_count()} CPUs;")
    print(loads.table(), flush=True)
    return loads


def _workload(options: Options, model: str, concurrency: int) -> Workload:
    return Workload(
        model=model,
        num_prompts=concurrency * (1 if options.quick else _WAVES),
        input_len=options.input_len,
        output_len=options.output_len,
    )


def _parse_options(argv: Sequence[str] | None = None) -> Options:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one prompt per stream, two short split rounds")
    add("--json", type=Path, metavar="FILE", help="write the numbers here, as one flat object")
    add("--model", type=Path, metavar="DIR", help="default: a random 125M Llama, made anew")
    add("--concurrency", default="1,8,32", help="streams at once; default: 1,8,32")
    add("--input-len", type=int, default=128, help="tokens of a prompt; default: 128")
    add("--output-len", type=int, default=64, help="tokens of an answer; default: 64")
    add("--num-threads", type=int, default=2, help="threads of a worker on a CPU; default: 2")
    add("--device", default="auto", help="where workers compute: auto, cpu, cuda, cuda:N")
    add("--kv-cache-memory-gb", type=float, default=0.5, help="of each engine; default: 0.5 GiB")
    add("--split-concurrency", type=int, default=8, help="of the split's tax; default: 8")
    add("--split-rounds", type=int, help="of the split's tax; default: 6, with --quick 2")
    add("--base-url", metavar="URL", help="measure this server; no split's tax")
    add("--peer", metavar="URL", help="an OpenAI-shaped server to compare with")
    add("--rounds", type=int, help="at each concurrency; default: 1, with --peer 5, with --quick 1")
    given = parser.parse_args(argv)
    if given.peer is not None and given.peer == given.base_url:
        parser.error(f"--peer: {given.peer}: it must not be the server that it is compared with")
    if given.model is not None and not (given.model / "config.json").is_file():
        parser.error(f"--model: {given.model}: it must be a model directory; see make_model.py")
    values = vars(given)
    try:
        values["concurrency"] = tuple(map(int, given.concurrency.split(",")))
    except ValueError:
        parser.error(f"--concurrency: {given.concurrency}: it must be numbers such as 1,8,32")
    values["rounds"] = given.rounds or (5 if given.peer and not given.quick else 1)
    values["split_rounds"] = given.split_rounds or (2 if given.quick else 6)
    return Options(**values)


def _main() -> None:
    options = _parse_options()
    try:
        metrics = uvloop.run(measure(options))
    except (RuntimeError, aiohttp.ClientError) as error:
        sys.exit(f"serve.py: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):  # what was started has ended
        sys.exit(130)
    if options.json is not None:
        options.json.write_text(json.dumps(metrics, indent=2) + "\n")
    _report("done")


if __name__ == "__main__":
    _main()
