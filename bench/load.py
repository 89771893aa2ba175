"""Loads an OpenAI-shaped server with streams of random tokens, and measures what clients feel.

    python bench/load.py --base-url http://127.0.0.1:8000 --concurrency 1,8,32

A closed loop: each of `concurrency` slots sends its next prompt when its last one is complete. The
prompts are token ids, all different, so no prefix cache helps and no tokenizer is measured; with
`ignore_eos` every answer has its full length. Only what is counted is parsed, so that one core of
this reads more than one router can send.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import uvloop

WARM_UP_OUTPUT_LEN = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent."""

    model: str
    num_prompts: int
    input_len: int
    """Tokens of each prompt."""
    output_len: int
    """Tokens of each answer."""
    vocab_size: int = 1000
    """Prompts are drawn from the ids below it."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What came back, at one concurrency. Times are in milliseconds."""

    concurrency: int
    num_output_tokens: int
    duration_s: float
    """From the first request sent to the last answer complete."""
    output_tok_s: float
    ttft_mean_ms: float
    """Time to first token: from sending a request to its first piece of text."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    """Time per output token after the first, as each request has it on average."""
    itl_p99_ms: float
    """Between two pieces of one stream; a piece has one token or, if the server merges, more."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """When the pieces of one stream came, in seconds since its request was sent."""

    arrivals: list[float]
    num_tokens: int


async def run_load(base_url: str, workload: Workload, concurrency: int) -> LoadResult:
    """Warm up, then measure; raises RuntimeError if the server refuses or breaks a request."""
    connector = aiohttp.TCPConnector(limit=0)  # the slots are the limit
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as session:
        draw = random.Random(f"{workload.seed} {concurrency}")
        warm_up_len = min(workload.output_len, WARM_UP_OUTPUT_LEN)
        warm_up = [_body(workload, draw, warm_up_len) for _ in range(concurrency)]
        await _send_all(session, warm_up, concurrency)

        bodies = [_body(workload, draw, workload.output_len) for _ in range(workload.num_prompts)]
        started = time.perf_counter()
        streams = await _send_all(session, bodies, concurrency)
        duration_s = time.perf_counter() - started
    return _summarize(streams, concurrency, duration_s)


async def find_model(base_url: str) -> str:
    """The first model that the server lists."""
    async with aiohttp.ClientSession(base_url) as session, session.get("/v1/models") as response:
        response.raise_for_status()
        model: str = (await response.json())["data"][0]["id"]
        return model


def _body(workload: Workload, draw: random.Random, output_len: int) -> bytes:
    body = {
        "model": workload.model,
        "prompt": [draw.randrange(workload.vocab_size) for _ in range(workload.input_len)],
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def _send_all(
    session: aiohttp.ClientSession, bodies: Sequence[bytes], concurrency: int
) -> list[_Stream]:
    streams: list[_Stream] = []
    remaining = iter(bodies)

    async def slot(remaining: Iterator[bytes]) -> None:
        for body in remaining:  # shared by the slots: each takes the next one
            streams.append(await _send(session, body))  # noqa: PERF401

    async with asyncio.TaskGroup() as slots:
        for _ in range(concurrency):
            slots.create_task(slot(remaining))
    return streams


async def _send(session: aiohttp.ClientSession, body: bytes) -> _Stream:
    arrivals: list[float] = []
    num_tokens: int | None = None
    headers = {"Content-Type": "application/json"}
    started = time.perf_counter()
    async with session.post("/v1/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {await response.text()}")
        rest = b""
        async for piece in response.content.iter_any():
            elapsed = time.perf_counter() - started
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if b'"finish_reason":null' in event:  # nearly all: text, and nothing else to know
                    arrivals.append(elapsed)
                    continue
                if event == b"data: [DONE]" or event.startswith(b":"):  # a comment: it is alive
                    continue
                chunk = json.loads(event.removeprefix(b"data: "))
                if "error" in chunk:
                    raise RuntimeError(f"stream broken: {chunk['error']}")
                if any(choice["text"] for choice in chunk["choices"]):
                    arrivals.append(elapsed)  # text that comes with the end
                if chunk.get("usage"):
                    num_tokens = chunk["usage"]["completion_tokens"]
    if num_tokens is None or not arrivals:
        raise RuntimeError("stream ended without text or usage")
    return _Stream(arrivals, num_tokens)


def _summarize(streams: Sequence[_Stream], concurrency: int, duration_s: float) -> LoadResult:
    ttft_ms = np.array([stream.arrivals[0] for stream in streams]) * 1e3
    tpot_ms = [
        (stream.arrivals[-1] - stream.arrivals[0]) / (stream.num_tokens - 1) * 1e3
        for stream in streams
        if stream.num_tokens > 1
    ]
    itl_ms = np.concatenate([np.diff(stream.arrivals) for stream in streams]) * 1e3
    num_output_tokens = sum(stream.num_tokens for stream in streams)
    return LoadResult(
        concurrency=concurrency,
        num_output_tokens=num_output_tokens,
        duration_s=duration_s,
        output_tok_s=num_output_tokens / duration_s,
        ttft_mean_ms=float(ttft_ms.mean()),
        ttft_p50_ms=float(np.percentile(ttft_ms, 50)),
        ttft_p99_ms=float(np.percentile(ttft_ms, 99)),
        tpot_mean_ms=float(np.mean(tpot_ms)) if tpot_ms else 0.0,
        itl_p99_ms=float(np.percentile(itl_ms, 99)) if itl_ms.size else 0.0,
    )


def metrics_of(results: Sequence[LoadResult]) -> dict[str, float]:
    """The results as one flat object: names to numbers."""
    metrics: dict[str, float] = {}
    for result in results:
        suffix = f"c{result.concurrency}"
        metrics[f"output_tok_s_{suffix}"] = result.output_tok_s
        metrics[f"ttft_ms_{suffix}"] = result.ttft_mean_ms
        metrics[f"ttft_p50_ms_{suffix}"] = result.ttft_p50_ms
        metrics[f"ttft_p99_ms_{suffix}"] = result.ttft_p99_ms
        metrics[f"tpot_ms_{suffix}"] = result.tpot_mean_ms
        metrics[f"itl_p99_ms_{suffix}"] = result.itl_p99_ms
    return {name: round(value, 3) for name, value in metrics.items()}


def format_table(results: Sequence[LoadResult]) -> str:
    """The results as text, a line per concurrency."""
    columns = ["concurrency", "out tok/s", "ttft ms", "p50", "p99", "ms/token", "itl p99 ms"]
    lines = ["  ".join(f"{column:>11}" for column in columns)]
    for result in results:
        values = [
            result.output_tok_s,
            result.ttft_mean_ms,
            result.ttft_p50_ms,
            result.ttft_p99_ms,
            result.tpot_mean_ms,
            result.itl_p99_ms,
        ]
        numbers = "  ".join(f"{value:>11,.2f}" for value in values)
        lines.append(f"{result.concurrency:>11}  {numbers}")
    return "\n".join(lines)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--concurrency", default="1,8,32", help="default: 1,8,32")
    parser.add_argument("--num-prompts", type=int, default=64, help="for each concurrency")
    parser.add_argument("--input-len", type=int, default=128, help="tokens")
    parser.add_argument("--output-len", type=int, default=64, help="tokens")
    parser.add_argument("--vocab-size", type=int, default=1000, help="prompts use ids below it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one prompt per slot")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    return parser.parse_args()


async def _main(arguments: argparse.Namespace) -> None:
    model = arguments.model or await find_model(arguments.base_url)
    results = []
    for concurrency in map(int, arguments.concurrency.split(",")):
        workload = Workload(
            model=model,
            num_prompts=concurrency if arguments.quick else arguments.num_prompts,
            input_len=arguments.input_len,
            output_len=arguments.output_len,
            vocab_size=arguments.vocab_size,
            seed=arguments.seed,
        )
        print(f"concurrency {concurrency}, {workload.num_prompts} prompts …", file=sys.stderr)
        results.append(await run_load(arguments.base_url, workload, concurrency))
    print(format_table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(metrics_of(results), indent=2) + "\n")


if __name__ == "__main__":
    uvloop.run(_main(_parse_arguments()))
