"""Measures how requests with structured output slow down other requests.

    python bench/structured.py [--model DIR]

Sixteen streams run at once, on the model that Quire ships or on another. The shipped one is so
small that a step takes two milliseconds, so the cost of eight grammars shows most. In one kind of
round all streams are free; in the other, half of them follow a JSON schema that never lets them end
early. The two kinds alternate, and the benchmark compares the token rates of the free half.
"""

import argparse
import asyncio
import time
from pathlib import Path
from statistics import median

import aiohttp
from harness.case import SHIPPED_MODEL, Results, arguments, main, progress
from harness.closed_loop import post_whole
from harness.processes import service
from harness.turns import Spread, turns

_NUM_STREAMS = 16
_PROMPT = "def parse(text):\n    "
_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 6, "maxLength": 12},
            "size": {"type": "integer", "minimum": 0, "maximum": 100000},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1},
        },
        "required": ["name", "size", "tags"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}


async def run_round(session: aiohttp.ClientSession, num_tokens: int, *, is_mixed: bool) -> float:
    """Return the tokens per second of the even streams, which are always free."""

    async def stream(index: int) -> float:
        body: dict[str, object] = {
            "prompt": _PROMPT,
            "max_tokens": num_tokens,
            "seed": index,
            "temperature": 1.0,
        }
        if is_mixed and index % 2:
            body["structured_outputs"] = {"json": _SCHEMA}
        else:
            body["ignore_eos"] = True
        started = time.perf_counter()
        await post_whole(session, body)
        return num_tokens / (time.perf_counter() - started)

    rates = await asyncio.gather(*map(stream, range(_NUM_STREAMS)))
    return sum(rates[::2]) / len(rates[::2])


async def measure(given: argparse.Namespace) -> Results:
    num_tokens, num_rounds = (200, 3) if given.quick else (600, 7)
    tok_s: dict[bool, list[float]] = {False: [], True: []}
    async with service(given.model, ()) as started:
        await started.wait_until_ready()
        async with aiohttp.ClientSession(started.base_url) as session:
            for index, is_mixed in turns(tok_s, num_rounds, warm_ups=1):
                rate = await run_round(session, num_tokens, is_mixed=is_mixed)
                progress(f"round {index}: {'half structured' if is_mixed else 'free'} {rate:.1f}")
                if index >= 0:
                    tok_s[is_mixed].append(rate)
    free, mixed = median(tok_s[False]), median(tok_s[True])
    ratio = Spread.of_ratios(tok_s[True], tok_s[False])
    print(f"model: {given.model}")
    print(f"tokens/s of a free stream: {free:.1f} among free ones, {mixed:.1f} among structured")
    print(f"free_speed_ratio {ratio}")
    return {"free_speed_ratio": ratio.median, "free_tok_s": free, "free_tok_s_mixed": mixed}


if __name__ == "__main__":
    parser = arguments(__doc__, quick="three short rounds")
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL, help="a model directory")
    main(parser.parse_args(), measure)
