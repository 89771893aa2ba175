"""Measures a whole service: throughput, latency, and the cost of the split into processes.

    python bench/serve.py --peer vllm=http://127.0.0.1:9000 --peer sglang=http://127.0.0.1:9001

Starts router, scheduler and worker on a 125M Llama with random weights, and sends 1, 8 and 32
streams of 128 tokens in and 64 out to their OpenAI API. Then the three processes take turns with
the same service in one process (engines/one_service.py). The client is a separate process on the
same machine. On a machine with few cores all processes compete, so the numbers include the client's
cost.

--peer NAME=URL lets another OpenAI-shaped server of the same model take turns with ours, round
after round; the flag may be given several times. The results are the medians of the rounds' ratios,
such as peer_ratio_NAME_c8. A single peer may be given as just a URL; then the names of its results
lack NAME. --base-url measures a running server, without the cost of the split.
"""

import argparse
import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engines.roofline import measure_shares
from engines.split import GRPC, HTTP, ONE_GRPC, ONE_HTTP, by_grpc, by_http, measure_split
from harness.case import Results, arguments, main, numbers, progress
from harness.closed_loop import (
    LoadResult,
    Turn,
    Workload,
    find_model,
    median_of,
    print_loads,
    run_load,
    take_turns,
)
from harness.processes import Service, model_directory, service
from harness.turns import Spread

_WAVES = 4
"""Prompts of each stream in a round; 1 with --quick."""
_FIRST_SEED = 9_999
"""Far from the seeds of the other loads on the same servers."""
_PEER_RATIOS = {
    "peer_ratio": "output_tok_s",
    "peer_ttft_ratio": "ttft_mean_ms",
    "peer_itl_p99_ratio": "itl_p99_ms",
}
"""The compared numbers: names to fields of LoadResult."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare with."""

    name: str
    """Empty for a single peer that was given without a name."""
    url: str

    @classmethod
    def parse(cls, text: str) -> "Peer":
        """Parse NAME=URL, or just a URL."""
        match = re.fullmatch(r"(?:([a-z0-9_]+)=)?(https?://\S+)", text)
        if match is None:
            raise argparse.ArgumentTypeError(
                f"{text}: must be URL or NAME=URL, with a name of a-z, 0-9 and _"
            )
        return cls(match[1] or "", match[2])


@dataclass(frozen=True, slots=True)
class Rounds:
    """The results at one concurrency, one per round."""

    ours: list[LoadResult]
    peers: Mapping[str, list[LoadResult]]
    """Maps the name of each peer to its results in the same rounds."""

    def ratios(self, peer: str) -> dict[str, Spread]:
        """Return our numbers ÷ the peer's, by the name of the ratio."""
        suffix = f"_{peer}" if peer else ""
        return {
            f"{name}{suffix}_c{self.ours[0].concurrency}": Spread.of_ratios(
                [getattr(each, field) for each in self.ours],
                [getattr(each, field) for each in self.peers[peer]],
            )
            for name, field in _PEER_RATIOS.items()
        }

    def metrics(self) -> dict[str, float]:
        values = median_of(self.ours).metrics()
        for peer in self.peers:
            for name, spread in self.ratios(peer).items():
                values |= spread.metrics(name)
        return values


async def measure_loads(
    base_url: str, peers: Sequence[Peer], workloads: Mapping[int, Workload], num_rounds: int
) -> list[Rounds]:
    """Run the workload of each concurrency `num_rounds` times, in turn; print tables."""
    sides = {url: await _side(url) for url in (base_url, *(peer.url for peer in peers))}
    loads = []
    for concurrency, workload in workloads.items():
        mine = replace(workload, seed=_FIRST_SEED)
        results = await take_turns(sides, mine, concurrency, num_rounds)
        loads.append(Rounds(results[base_url], {each.name: results[each.url] for each in peers}))
    print(f"medians of {num_rounds} rounds:")
    print_loads(median_of(each.ours) for each in loads)
    for name in (peer.name for peer in peers):
        title = name or "the peer"
        print(f"{title}:")
        print_loads(median_of(each.peers[name]) for each in loads)
        print(f"ours ÷ {title}:")
        for each in loads:
            for ratio, spread in each.ratios(name).items():
                print(f"  {ratio:<{24 + len(name)}} {spread}")
    return loads


async def _side(url: str) -> Turn[LoadResult]:
    model = await find_model(url)

    async def turn(workload: Workload, concurrency: int) -> LoadResult:
        return await run_load(url, replace(workload, model=model), concurrency)

    return turn


async def measure(given: argparse.Namespace) -> Results:
    if given.base_url is not None:
        return _metrics(await _measure_server(given, given.base_url))
    worker_flags = (
        *("--num-threads", str(given.num_threads)),
        *("--kv-cache-memory-gb", str(given.kv_cache_memory_gb)),
        *("--device", given.device),
    )
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(model_directory(given.model))
        progress("starting three processes, and one …")
        three = await stack.enter_async_context(service(model, worker_flags))
        one = await stack.enter_async_context(service(model, worker_flags, in_one_process=True))
        await asyncio.gather(three.wait_until_ready(), one.wait_until_ready())
        return await _measure_processes(given, model, three, one)


async def _measure_processes(
    given: argparse.Namespace, model: Path, three: Service, one: Service
) -> Results:
    loads = await _measure_server(given, three.base_url)
    metrics = _metrics(loads)
    name = await find_model(three.base_url)
    if not given.quick:
        ours = (median_of(each.ours) for each in loads)
        alone = next((load for load in ours if load.concurrency == 1), None)
        metrics |= await measure_shares(three.base_url, name, model, alone, given.num_threads)
    concurrency = given.split_concurrency
    workload = _workload(given, name, concurrency)
    if given.quick:  # two short rounds take the time of one full round
        workload = replace(workload, output_len=-(-workload.output_len // 2))
    sides = {
        ONE_GRPC: by_grpc(one),
        GRPC: by_grpc(three),
        ONE_HTTP: by_http(one),
        HTTP: by_http(three),
    }
    tax = await measure_split(sides, workload, concurrency, given.split_rounds)
    print(f"\n{tax.table()}", flush=True)
    return metrics | tax.metrics()


async def _measure_server(given: argparse.Namespace, base_url: str) -> list[Rounds]:
    model = await find_model(base_url)
    print(f"{given.input_len} tokens in, {given.output_len} out;")
    workloads = {each: _workload(given, model, each) for each in given.concurrency}
    return await measure_loads(base_url, given.peer, workloads, given.rounds)


def _metrics(loads: list[Rounds]) -> dict[str, float]:
    return {name: value for each in loads for name, value in each.metrics().items()}


def _workload(given: argparse.Namespace, model: str, concurrency: int) -> Workload:
    return Workload(
        model=model,
        num_prompts=concurrency * (1 if given.quick else _WAVES),
        input_len=given.input_len,
        output_len=given.output_len,
    )


def _parse() -> argparse.Namespace:
    parser = arguments(__doc__, quick="one prompt per stream, two short split rounds")
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="default: a random 125M Llama")
    add("--concurrency", type=numbers, default="1,8,32", help="streams at once, such as 1,8,32")
    add("--input-len", type=int, default=128, help="tokens of a prompt")
    add("--output-len", type=int, default=64, help="tokens of an answer")
    add("--num-threads", type=int, default=2, help="threads of a worker on a CPU")
    add("--device", default="auto", help="where workers compute: auto, cpu, cuda, cuda:N")
    add("--kv-cache-memory-gb", type=float, default=0.5, help="GiB of KV per engine")
    add("--split-concurrency", type=int, default=8, help="streams for the cost of the split")
    add("--split-rounds", type=int, help="rounds of the split; default: 6, or 2 with --quick")
    add("--base-url", metavar="URL", help="measure this server, without the split")
    add(
        "--peer",
        action="append",
        type=Peer.parse,
        metavar="[NAME=]URL",
        help="an OpenAI-shaped server to compare with; may be given several times",
    )
    add("--rounds", type=int, help="per concurrency; default: 1, or 5 with --peer")
    given = parser.parse_args()
    given.peer = given.peer or []
    urls = [given.base_url, *(peer.url for peer in given.peer)]
    names = [peer.name for peer in given.peer]
    for peer in given.peer:
        if urls.count(peer.url) > 1:
            parser.error(f"--peer: {peer.url}: all compared servers must differ")
        if names.count(peer.name) > 1 or (len(names) > 1 and not peer.name):
            parser.error(f"--peer: {peer.name or peer.url}: several need names that differ")
    given.rounds = given.rounds or (5 if given.peer and not given.quick else 1)
    given.split_rounds = given.split_rounds or (2 if given.quick else 6)
    return given


if __name__ == "__main__":
    main(_parse(), measure)
    progress("done")
