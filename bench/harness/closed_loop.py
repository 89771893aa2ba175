"""Closed-loop clients: they send random prompts to a server, and measure its latency.

Each of `concurrency` clients sends its next prompt when its last one is complete. The prompts are
token ids and all differ, so no prefix cache helps and no tokenizer is measured; with `ignore_eos`
every answer has its full length. Clients parse only the parts that they count, so that one client
core can read more than a router sends.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, TypeAlias, TypeVar

import aiohttp
import numpy as np
from harness.case import BenchError, Table, progress
from harness.turns import turns

from quire.v1 import common_pb2, inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from rpc.peers.channel import open_channel

_WARM_UP_OUTPUT_LEN = 8
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a load."""

    model: str
    num_prompts: int
    input_len: int
    """Tokens of each prompt."""
    output_len: int
    """Tokens of each answer."""
    vocab_size: int = 1000
    """Prompts are drawn from the token ids below this one."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Throughput and latency at one concurrency. Times are in milliseconds."""

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
    """Time per output token after the first, averaged within each request."""
    itl_p99_ms: float
    """Time between two pieces of a stream. A piece has one token, or several if the server merges
    tokens."""

    def metrics(self) -> dict[str, float]:
        """Return the numbers by name; each name ends with the concurrency."""
        names = {"ttft_mean_ms": "ttft_ms", "tpot_mean_ms": "tpot_ms"}
        return {
            f"{names.get(each.name, each.name)}_c{self.concurrency}": getattr(self, each.name)
            for each in fields(self)
            if each.name.endswith(("_tok_s", "_ms"))
        }


def median_of(results: Sequence[LoadResult]) -> LoadResult:
    """Return the median of each number that varies."""
    names = [each.name for each in fields(LoadResult) if each.type is float]
    return replace(results[0], **{n: median(getattr(r, n) for r in results) for n in names})


def print_loads(results: Iterable[LoadResult]) -> None:
    """Print a table, a line per concurrency."""
    columns = ("out tok/s", "ttft ms", "p50", "p99", "ms/token", "itl p99 ms")
    table = Table("concurrency:d", *(f"{column}:,.2f" for column in columns))
    for each in results:
        table.row(
            *(each.concurrency, each.output_tok_s, each.ttft_mean_ms, each.ttft_p50_ms),
            *(each.ttft_p99_ms, each.tpot_mean_ms, each.itl_p99_ms),
        )


async def find_model(base_url: str) -> str:
    """Return the first model that the server lists."""
    async with aiohttp.ClientSession(base_url) as session, session.get("/v1/models") as response:
        response.raise_for_status()
        model: str = (await response.json())["data"][0]["id"]
        return model


# --- taking turns ---------------------------------------------------------------------------------

Result = TypeVar("Result")
Turn: TypeAlias = Callable[[Workload, int], Awaitable[Result]]
"""One side's turn: completes a workload at a concurrency."""


async def take_turns(
    sides: Mapping[str, Turn[Result]], workload: Workload, concurrency: int, num_rounds: int
) -> dict[str, list[Result]]:
    """Give all sides the same prompts in a round, and new ones in each round."""
    results: dict[str, list[Result]] = {side: [] for side in sides}
    for index, side in turns(sides, num_rounds):
        if not any(len(each) > index for each in results.values()):
            progress(f"concurrency {concurrency}: round {index + 1} of {num_rounds} …")
        mine = replace(workload, seed=workload.seed + 1 + index)
        results[side].append(await sides[side](mine, concurrency))
    return results


# --- HTTP -----------------------------------------------------------------------------------------


def completion_body(workload: Workload, prompt: Sequence[int]) -> bytes:
    """Return a request for a streamed completion of full length, which `post_stream` sends."""
    body = {
        "model": workload.model,
        "prompt": prompt,
        "max_tokens": workload.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def run_load(base_url: str, workload: Workload, concurrency: int) -> LoadResult:
    """Warm up, then measure over HTTP; raises BenchError if the server refuses or breaks."""
    # The slots limit the requests, not the connector. Each request has its own connection, because
    # llama.cpp closes it.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as session:
        draw = random.Random(f"{workload.seed} {concurrency}")
        warm_up = replace(workload, output_len=min(workload.output_len, _WARM_UP_OUTPUT_LEN))
        await _send_all(session, _bodies(warm_up, draw, concurrency), concurrency)
        bodies = _bodies(workload, draw, workload.num_prompts)
        started = time.perf_counter()
        streams = await _send_all(session, bodies, concurrency)
        return summarize(streams, concurrency, time.perf_counter() - started)


def _bodies(workload: Workload, draw: random.Random, count: int) -> list[bytes]:
    return [
        completion_body(
            workload, [draw.randrange(workload.vocab_size) for _ in range(workload.input_len)]
        )
        for _ in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Stream:
    """The answer to one request."""

    arrivals: list[float]
    """Arrival times of the answer's pieces, in seconds since the request was sent."""
    num_tokens: int


async def _send_all(
    session: aiohttp.ClientSession, bodies: Iterable[bytes], concurrency: int
) -> list[Stream]:
    streams: list[Stream] = []

    async def send(body: bytes) -> None:
        streams.append(await timed_stream(session, body))

    await in_parallel(bodies, concurrency, send)
    return streams


async def timed_stream(session: aiohttp.ClientSession, body: bytes) -> Stream:
    """Send a request and read its stream; raises BenchError if the stream has no text or usage."""
    arrivals: list[float] = []
    started = time.perf_counter()
    num_tokens = await post_stream(
        session, body, lambda: arrivals.append(time.perf_counter() - started)
    )
    if num_tokens is None or not arrivals:
        raise BenchError("stream ended without text or usage")
    return Stream(arrivals, num_tokens)


async def in_parallel(
    items: Iterable[Any], concurrency: int, send: Callable[[Any], Awaitable[None]]
) -> None:
    """Send each item, `concurrency` at a time."""
    remaining = iter(items)

    async def slot() -> None:
        for item in remaining:  # shared by the clients: each takes the next item
            await send(item)

    try:
        async with asyncio.TaskGroup() as slots:
            for _ in range(concurrency):
                slots.create_task(slot())
    except BaseExceptionGroup as group:  # the first error is the cause
        raise group.exceptions[0] from None


async def post_stream(
    session: aiohttp.ClientSession, body: bytes, on_text: Callable[[], None]
) -> int | None:
    """Call `on_text` when a piece of text comes; return the tokens that the usage counts."""
    num_tokens: int | None = None
    async with session.post("/v1/completions", data=body, headers=_JSON) as response:
        if response.status != 200:
            raise BenchError(f"status {response.status}: {await response.text()}")
        rest = b""
        async for piece in response.content.iter_any():
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if b'"finish_reason":null' in event:  # nearly all events: text, and nothing else
                    on_text()
                    continue
                if event == b"data: [DONE]" or event.startswith(b":"):  # a comment is a heartbeat
                    continue
                chunk = json.loads(event.removeprefix(b"data: "))
                if "error" in chunk:
                    raise BenchError(f"stream broken: {chunk['error']}")
                if any(choice["text"] for choice in chunk["choices"]):
                    on_text()  # text that comes with the end
                if chunk.get("usage"):
                    num_tokens = chunk["usage"]["completion_tokens"]
    return num_tokens


async def post_whole(session: aiohttp.ClientSession, body: Mapping[str, Any]) -> str:
    """Return the text of a completion; raises BenchError unless it has `max_tokens` tokens."""
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise BenchError(f"status {response.status}: {await response.text()}")
        answer = await response.json()
    if (produced := answer["usage"]["completion_tokens"]) != body["max_tokens"]:
        raise BenchError(f"an answer ended after {produced} of {body['max_tokens']} tokens")
    text: str = answer["choices"][0]["text"]
    return text


def summarize(streams: Sequence[Stream], concurrency: int, duration_s: float) -> LoadResult:
    """Return the throughput and the latencies of complete streams."""
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


# --- gRPC -----------------------------------------------------------------------------------------


def draw_prompts(workload: Workload) -> list[list[int]]:
    """Draw the workload's prompts, by its seed. Loads over HTTP have other prompts."""
    draw = random.Random(f"prompts {workload.seed}")
    return [
        [draw.randrange(workload.vocab_size) for _ in range(workload.input_len)]
        for _ in range(workload.num_prompts)
    ]


def sampling_of(workload: Workload) -> common_pb2.SamplingParams:
    """Return parameters for greedy sampling to the full length."""
    return common_pb2.SamplingParams(
        temperature=0, seed=0, max_tokens=workload.output_len, ignore_eos=True
    )


async def grpc_tok_s(target: str, workload: Workload, concurrency: int) -> float:
    """Send all prompts over gRPC; return tokens/s. Raises BenchError if an answer is too short."""
    requests = [
        inference_pb2.GenerateRequest(
            model=workload.model,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=sampling_of(workload),
        )
        for prompt in draw_prompts(workload)
    ]
    num_tokens = 0
    async with open_channel(target) as channel:
        stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]

        async def send(request: inference_pb2.GenerateRequest) -> None:
            nonlocal num_tokens
            async for response in stub.Generate(request):
                num_tokens += len(response.delta.token_ids)  # the last message has no text

        await stub.ListModels(inference_pb2.ListModelsRequest())  # opens the connection
        started = time.perf_counter()
        await in_parallel(requests, concurrency, send)
        duration_s = time.perf_counter() - started
    if num_tokens != workload.num_prompts * workload.output_len:
        raise BenchError(f"{num_tokens} tokens came for {workload}")
    return num_tokens / duration_s
