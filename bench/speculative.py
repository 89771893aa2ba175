"""Measures the gain of speculative decoding on the shipped model, and its cost without a gain.

    python bench/speculative.py [--draft-model DIR]

Two services of the same model run side by side; one speculates. In turn, each gets the same
requests, at 1 and at 4 streams. Some prompts are Python from this machine's standard library,
continued greedily: the model then repeats its prompt and itself. The others are random tokens at
temperature 1, where nothing can be guessed. Both services should return the same outputs.
In bfloat16 a few greedy outputs may differ, so the share of these that agrees is printed.
"""

import argparse
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import aiohttp
from harness.case import SHIPPED_MODEL, Results, Table, arguments, main
from harness.closed_loop import in_parallel, post_whole
from harness.processes import HOST, free_ports, service
from harness.turns import Spread, turns
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

_CONCURRENCIES = (1, 4)
_NUM_PROMPTS = 4
_PROMPT_LEN = 200
_COUNTER = "quire_worker_spec_decode_num_"
_KINDS = ("code", "random")
_PLAIN, _SPECULATIVE = 0, 1


def make_prompts(kind: str, seed: int) -> list[list[int]]:
    """Draw prompts of `_PROMPT_LEN` tokens: pieces of code, or random tokens."""
    draw = random.Random(f"{kind} {seed}")
    if kind == "random":
        return [[draw.randrange(5, 4000) for _ in range(_PROMPT_LEN)] for _ in range(_NUM_PROMPTS)]
    tokenizer = Tokenizer.from_file(str(SHIPPED_MODEL / "tokenizer.json"))
    sources = sorted(Path(random.__file__).parent.glob("*.py"))
    prompts: list[list[int]] = []
    while len(prompts) < _NUM_PROMPTS:
        ids = tokenizer.encode(draw.choice(sources).read_text(errors="replace")).ids
        if len(ids) > _PROMPT_LEN:
            start = draw.randrange(len(ids) - _PROMPT_LEN)
            prompts.append(ids[start : start + _PROMPT_LEN])
    return prompts


async def run_round(
    session: aiohttp.ClientSession, kind: str, seed: int, concurrency: int, length: int
) -> tuple[float, list[str]]:
    """Send all prompts; return tokens per second, and the texts."""
    prompts = make_prompts(kind, seed)
    outputs = [""] * len(prompts)

    async def send(item: tuple[int, list[int]]) -> None:
        index, prompt = item
        body = {
            "prompt": prompt,
            "max_tokens": length,
            "seed": index,
            "temperature": 0.0 if kind == "code" else 1.0,
            "ignore_eos": True,
        }
        outputs[index] = await post_whole(session, body)

    started = time.perf_counter()
    await in_parallel(enumerate(prompts), concurrency, send)
    return len(prompts) * length / (time.perf_counter() - started), outputs


async def read_counters(worker_url: str) -> dict[str, float]:
    """Return the numbers of the worker's drafts, draft tokens and accepted tokens, by name."""
    async with aiohttp.ClientSession() as session, session.get(f"{worker_url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return {
            sample.name.removeprefix(_COUNTER).removesuffix("_total"): sample.value
            for family in families
            for sample in family.samples
            if sample.name.startswith(_COUNTER) and sample.name.endswith("_total")
        }


async def measure(given: argparse.Namespace) -> Results:
    num_rounds, length = (3, 128) if given.quick else (7, 256)
    flags = [f"--num-draft-tokens={given.num_draft_tokens}", "--speculative=ngram"]
    if given.draft_model is not None:
        flags[1:] = ["--speculative=draft", f"--draft-model={given.draft_model}"]
    metrics: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        sessions = []
        (port,) = free_ports(1)
        for worker_flags in ([], [*flags, f"--worker-http-port={port}"]):
            started = await stack.enter_async_context(service(SHIPPED_MODEL, worker_flags))
            await started.wait_until_ready()
            session = aiohttp.ClientSession(started.base_url)
            sessions.append(await stack.enter_async_context(session))
        table = Table(
            *("prompts:<7", "streams:d", "tokens/s without:.0f", "with:.0f", "ratio (range):<24"),
            *("accepted:.2f", "tokens per draft:.2f"),
        )
        for kind in _KINDS:
            for concurrency in _CONCURRENCIES:
                tok_s: tuple[list[float], list[float]] = ([], [])
                texts: tuple[list[str], list[str]] = ([], [])
                before = await read_counters(f"http://{HOST}:{port}")
                for index, side in turns((_PLAIN, _SPECULATIVE), num_rounds, warm_ups=1):
                    rate, outputs = await run_round(
                        sessions[side], kind, index, concurrency, length
                    )
                    if index >= 0:
                        tok_s[side].append(rate)
                        texts[side].extend(outputs)
                after = await read_counters(f"http://{HOST}:{port}")
                count = {name: after[name] - before[name] for name in after}
                metrics |= _report(table, kind, concurrency, tok_s, count)
                if kind == "code":
                    same = [a == b for a, b in zip(*texts, strict=True)]
                    metrics[f"same_output_c{concurrency}"] = sum(same) / len(same)
    same_share = min(metrics[f"same_output_c{c}"] for c in _CONCURRENCIES)
    print(f"greedy outputs that are the same with and without: {same_share:.3f} or more")
    return metrics


def _report(
    table: Table,
    kind: str,
    concurrency: int,
    tok_s: Sequence[Sequence[float]],
    count: dict[str, float],
) -> dict[str, float]:
    """Print a row; return its numbers by name."""
    ratio = Spread.of_ratios(tok_s[_SPECULATIVE], tok_s[_PLAIN])
    plain, fast = map(median, tok_s)
    acceptance = count["accepted_tokens"] / max(1, count["draft_tokens"])
    per_draft = 1 + count["accepted_tokens"] / max(1, count["drafts"])
    table.row(kind, concurrency, plain, fast, str(ratio), acceptance, per_draft)
    suffix = "" if kind == "code" else f"_{kind}"
    return {
        f"speedup{suffix}_c{concurrency}": ratio.median,
        f"acceptance{suffix}_c{concurrency}": acceptance,
        f"tokens_per_draft{suffix}_c{concurrency}": per_draft,
        f"tok_s{suffix}_c{concurrency}": fast,
        f"tok_s_without{suffix}_c{concurrency}": plain,
    }


if __name__ == "__main__":
    parser = arguments(__doc__, quick="three short rounds")
    parser.add_argument("--draft-model", type=Path, metavar="DIR", help="instead of n-gram lookup")
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K")
    main(parser.parse_args(), measure)
