"""Measures what speculative decoding gains on the model that Quire ships, and on what it is wasted.

    python bench/speculative.py [--draft-model DIR]

Two services of the same model run side by side, one of which guesses. In turn, each gets the same
requests, at 1 and at 4 streams: the Python of this machine's standard library to be continued,
greedily, where the model repeats its prompt and itself; and tokens drawn at random, at temperature
1, where there is nothing to guess. The turns alternate, so that a machine's slow moments hit both.
What comes back must be the same from both (greedily; a bfloat16 model may see it otherwise once in
a while, and the share that agrees is printed).
"""

import argparse
import asyncio
import json
import random
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import uvloop
from processes import service
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from quire.cli.up import ports

_MODEL = Path(__file__).resolve().parents[1] / "models" / "quire-tiny-python"
_CONCURRENCIES = (1, 4)
_PROMPT_LEN = 200
_COUNTER = "quire_worker_spec_decode_num_"
_KINDS = ("code", "random")


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of requests gave."""

    tok_s: float
    outputs: tuple[str, ...]


def make_prompts(kind: str, num_prompts: int, seed: int) -> list[list[int]]:
    """Draw prompts of `_PROMPT_LEN` tokens: pieces of code, or tokens at random."""
    draw = random.Random(f"{kind} {seed}")
    if kind == "random":
        return [[draw.randrange(5, 4000) for _ in range(_PROMPT_LEN)] for _ in range(num_prompts)]
    tokenizer = Tokenizer.from_file(str(_MODEL / "tokenizer.json"))
    sources = sorted(Path(random.__file__).parent.glob("*.py"))
    prompts: list[list[int]] = []
    while len(prompts) < num_prompts:
        ids = tokenizer.encode(draw.choice(sources).read_text(errors="replace")).ids
        if len(ids) > _PROMPT_LEN:
            start = draw.randrange(len(ids) - _PROMPT_LEN)
            prompts.append(ids[start : start + _PROMPT_LEN])
    return prompts


async def run_round(
    session: aiohttp.ClientSession,
    kind: str,
    prompts: list[list[int]],
    concurrency: int,
    length: int,
) -> Round:
    """Send all prompts, so many at a time."""
    outputs = [""] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def slot() -> None:
        for index, prompt in waiting:
            body = {
                "prompt": prompt,
                "max_tokens": length,
                "seed": index,
                "temperature": 0.0 if kind == "code" else 1.0,
                "ignore_eos": True,
            }
            async with session.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    raise RuntimeError(f"status {response.status}: {await response.text()}")
                answer = await response.json()
            if (produced := answer["usage"]["completion_tokens"]) != length:
                raise RuntimeError(f"request {index} ended after {produced} of {length} tokens")
            outputs[index] = answer["choices"][0]["text"]

    started = time.perf_counter()
    await asyncio.gather(*(slot() for _ in range(concurrency)))
    return Round(len(prompts) * length / (time.perf_counter() - started), tuple(outputs))


async def read_counters(session: aiohttp.ClientSession) -> dict[str, float]:
    """Read how often, how many and how many rightly the worker has guessed."""
    async with session.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples]
    return {
        sample.name.removeprefix(_COUNTER).removesuffix("_total"): sample.value
        for sample in samples
        if sample.name.startswith(_COUNTER) and sample.name.endswith("_total")
    }


async def measure(flags: list[str], num_rounds: int, length: int) -> dict[str, float]:
    """Measure, print, and give the numbers by name."""
    numbers: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        sessions = []
        worker_http = ports.prefer("127.0.0.1", 0, ())
        for worker_flags in ([], [*flags, f"--worker-http-port={worker_http}"]):
            started = await stack.enter_async_context(service(_MODEL, worker_flags))
            await started.wait_until_ready()
            sessions.append(
                await stack.enter_async_context(aiohttp.ClientSession(started.base_url))
            )
        worker = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://127.0.0.1:{worker_http}")
        )
        print("prompts  streams  tokens/s without      with  ratio (range)        kept  per draft")
        for kind in _KINDS:
            for concurrency in _CONCURRENCIES:
                pairs, same = [], []
                before = await read_counters(worker)
                for turn in range(-1, num_rounds):  # the first warms up
                    prompts = make_prompts(kind, 4, turn)
                    pair = [
                        await run_round(session, kind, prompts, concurrency, length)
                        for session in (sessions if turn % 2 else sessions[::-1])
                    ]
                    pair = pair if turn % 2 else pair[::-1]
                    if turn >= 0:
                        pairs.append(pair)
                        same += [a == b for a, b in zip(*(r.outputs for r in pair), strict=True)]
                after = await read_counters(worker)
                count = {name: after[name] - before[name] for name in after}
                numbers |= _report(kind, concurrency, pairs, count)
                if kind == "code":
                    numbers[f"same_output_c{concurrency}"] = sum(same) / len(same)
    same_share = min(numbers[f"same_output_c{c}"] for c in _CONCURRENCIES)
    print(f"greedy outputs that are the same with and without: {same_share:.3f} or more")
    return numbers


def _report(
    kind: str, concurrency: int, pairs: list[list[Round]], count: dict[str, float]
) -> dict[str, float]:
    """Print a line; give its numbers by name."""
    ratios = sorted(fast.tok_s / plain.tok_s for plain, fast in pairs)
    plain, fast = (median(pair[i].tok_s for pair in pairs) for i in (0, 1))
    acceptance = count["accepted_tokens"] / max(1, count["draft_tokens"])
    per_draft = 1 + count["accepted_tokens"] / max(1, count["drafts"])
    spread = f"{median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})"
    print(
        f"{kind:7}  {concurrency:7}  {plain:16.0f}  {fast:8.0f}  {spread:18}"
        f"  {acceptance:8.2f}  {per_draft:8.2f}",
        flush=True,
    )
    suffix = "" if kind == "code" else f"_{kind}"
    return {
        f"speedup{suffix}_c{concurrency}": round(median(ratios), 4),
        f"acceptance{suffix}_c{concurrency}": round(acceptance, 4),
        f"tokens_per_draft{suffix}_c{concurrency}": round(per_draft, 4),
        f"tok_s{suffix}_c{concurrency}": round(fast, 1),
        f"tok_s_without{suffix}_c{concurrency}": round(plain, 1),
    }


def _main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three short rounds")
    parser.add_argument("--draft-model", type=Path, metavar="DIR", help="guess by this one instead")
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    given = parser.parse_args()
    flags = [f"--num-draft-tokens={given.num_draft_tokens}"]
    if given.draft_model is None:
        flags.append("--speculative=ngram")
    else:
        flags += ["--speculative=draft", f"--draft-model={given.draft_model}"]
    try:
        metrics = uvloop.run(measure(flags, *((3, 128) if given.quick else (7, 256))))
    except (RuntimeError, aiohttp.ClientError) as error:
        sys.exit(f"speculative.py: {error}")
    if given.json is not None:
        given.json.write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    _main()
