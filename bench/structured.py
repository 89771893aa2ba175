"""Measures what requests with structured output cost the requests beside them.

    python bench/structured.py [--model DIR]

Sixteen streams run at once, of the model that Quire ships or of another. The shipped one is so
small that a step takes two milliseconds, in which what eight grammars cost shows most. In turn, all
of them are free, or half of them must keep to a JSON schema that never lets them end early;
compared is the rate at which the free half gets its tokens. The turns alternate, so that a
machine's slow moments hit both.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from statistics import median

import aiohttp
import uvloop
from processes import service

_MODEL = Path(__file__).resolve().parents[1] / "models" / "quire-tiny-python"
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
    """Tokens per second of the free half, and of the others where all are free."""

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
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            answer = await response.json()
        if (produced := answer["usage"]["completion_tokens"]) != num_tokens:
            raise RuntimeError(f"stream {index} ended after {produced} of {num_tokens} tokens")
        return num_tokens / (time.perf_counter() - started)

    rates = await asyncio.gather(*map(stream, range(_NUM_STREAMS)))
    return sum(rates[::2]) / len(rates[::2])


async def measure(model: Path, num_tokens: int, num_rounds: int) -> dict[str, float]:
    """Measure, print, and give the numbers by name."""
    async with service(model, ()) as started:
        await started.wait_until_ready()
        async with aiohttp.ClientSession(started.base_url) as session:
            free, mixed = [], []
            for turn in range(-1, num_rounds):  # the first warms up
                pair = [
                    await run_round(session, num_tokens, is_mixed=is_mixed)
                    for is_mixed in (False, True)
                ]
                print(f"round {turn}: {pair[0]:.1f} {pair[1]:.1f}", file=sys.stderr, flush=True)
                if turn >= 0:
                    free.append(pair[0])
                    mixed.append(pair[1])
    ratios = sorted(b / a for a, b in zip(free, mixed, strict=True))
    print(f"model: {model}")
    print(f"tokens/s of a free stream: {median(free):.1f} among free ones, ", end="")
    print(f"{median(mixed):.1f} among structured ones")
    print(f"free_speed_ratio {median(ratios):.3f} ({ratios[0]:.3f} … {ratios[-1]:.3f})")
    return {
        "free_speed_ratio": round(median(ratios), 4),
        "free_tok_s": round(median(free), 2),
        "free_tok_s_mixed": round(median(mixed), 2),
    }


def _main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=_MODEL, help="a model directory")
    parser.add_argument("--quick", action="store_true", help="three short rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    given = parser.parse_args()
    try:
        metrics = uvloop.run(measure(given.model, *((200, 3) if given.quick else (600, 7))))
    except (RuntimeError, aiohttp.ClientError) as error:
        sys.exit(f"structured.py: {error}")
    if given.json is not None:
        given.json.write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    _main()
