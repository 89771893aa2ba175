"""Injects random faults under live streams, and checks that no token is lost, repeated or changed.

    python bench/chaos.py --kills 60
    python bench/chaos.py --soak 3600 --every 15 --standby
    python bench/chaos.py --roles --kills 60
    python bench/chaos.py --family window --kills 60
    python bench/chaos.py --family recurrent --kills 60
    python bench/chaos.py --family states-only --kills 60
    python bench/chaos.py --turns 500
    python bench/chaos.py --agent 40

A service of two routers, a scheduler and two workers serves 64 streams of every kind, through
clients that resume. With --family, the model has random weights, and layers that have a window or
are recurrent. Repeatedly, a process is killed with SIGKILL or suspended for some seconds, or a link
is cut or made silent. Each stream is compared, token for token, with the result of the same request
alone, before any fault.

- `lost`, `duplicated`, `contradicted`: the numbers of tokens that are missing, came twice, or are
  not the expected ones.
- `refused`: the number of calls that failed before a token had come, for example as UNAVAILABLE
  without a scheduler, and were made again with the same id; shown, but not judged.
- `stall_p50_s`, `stall_p99_s`: the longest pause of a stream after a fault that it lived through;
  `kill_and_stop_stall_p99_s`: the longest pause after a fault of a process, not of a link.
- `recomputed_after_scheduler_kill`: tokens that were computed again for a new scheduler, in a first
  phase in which only the scheduler is killed. The tokens belong to outputs that had just ended, but
  whose end no router had read: less than a block of each output (docs/failure.md). With --cramped,
  --roles and --family the number is shown, but not judged: preempted sequences may be recomputed,
  sequences that move to a decode worker compute their last tokens again, and sequences of recurrent
  models compute all tokens since their last checkpoint again.
- `blocks_exact`: whether at the end no block is held, and each block of each worker is free, cached
  or out of use.

With --turns, clients create stored responses (/v1/responses) instead, some of them in batches
(/v1/batches). Every few seconds processes are killed: all at the same time, then each alone, and so
on. Each response is read to its end, as a stream or at once, and its text is compared with the
text of the same turn without faults:

- `turns_lost`: turns that were accepted, but are missing or failed.
- `turns_doubled`: turns that were computed twice, or that have a repeated or missing event.
- `turns_contradicted`: turns with another text.

With --agent N, an agent makes N turns with a tool through /v1/responses, then through /v1/messages,
on simulated workers that replay the model's outputs. Every ten seconds processes are killed, in
turn: all at the same time, a router, the scheduler, a worker, and so on. A transcript has the
agent's texts, its calls of the tool, and their results. `transcripts_that_differ` counts the APIs
whose transcript differs in any byte from that of an undisturbed run.

Exits with 1 if one of these counts is wrong; the lengths of pauses are only shown.
"""

import argparse
import asyncio
import hashlib
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from faults.agent import Agent, write_model
from faults.models import KINDS, write_family
from faults.service import ChaosService, Fault, What, chaos_service
from faults.streams import Stall, Streams, make_cases, stalls
from faults.turns import TurnClient
from harness.case import SHIPPED_MODEL, Results, Table, arguments, main

from quire.client import AsyncClient
from quire.v1.kv_pb2 import KvTier

_NUM_BLOCKS = 2048
"""Enough blocks at each worker for all streams, so only faults cause recomputation."""
_NUM_BLOCKS_CRAMPED = 320
"""Enough for the longest request, and for a third of the streams."""
_MAX_RECOMPUTED = 3 * 15
"""The most tokens of a stream that may be recomputed when its scheduler is killed: less than a
block of 16 for each of at most three outputs."""
_AGENT_SPEEDUP = 0.15
"""An output of 100 tokens takes about 3 s, so some ten kills happen during 40 turns."""
_IDLE_S = 60.0
_NUM_LONGEST = 10
_SAME_S = 0.5
"""Stalls whose ends are at most this far apart are shown as one."""


@dataclass(slots=True)
class Run:
    faults: list[tuple[float, str]] = field(default_factory=list)
    """The time of each fault, by the monotonic clock, and its kind."""
    recomputed: int = 0
    blocks: list[str] = field(default_factory=list)
    """The blocks that are still held at the end."""


async def kill_schedulers(service: ChaosService, run: Run, num: int) -> None:
    """Kill the scheduler `num` times; count the tokens that the next one recomputes."""
    for _ in range(num):
        run.faults.append((time.monotonic(), "scheduler killed alone"))
        await service.befall(Fault(What.KILLED, "scheduler"))
        await service.wait_until_ready(["scheduler", *service.routers])
        await asyncio.sleep(1.0)
        run.recomputed += int((await service.metrics("scheduler"))["quire_recomputed_tokens_total"])


async def do_harm(
    service: ChaosService,
    run: Run,
    chance: random.Random,
    pauses_s: Iterator[float],
    faults: Iterator[Fault],
) -> None:
    """Inject a fault after each pause; one in four comes before the previous one is repaired."""
    for pause_s, fault in zip(pauses_s, faults, strict=False):
        await asyncio.sleep(pause_s)
        print(
            f"  {len(run.faults):4} {time.strftime('%H:%M:%S')} {fault.kind}: {fault}", flush=True
        )
        run.faults.append((time.monotonic(), fault.kind))
        await service.befall(fault)
        if chance.random() < 0.75:
            await service.wait_until_ready()


async def wrong_blocks(client: AsyncClient) -> list[str]:
    """Wait until no worker holds a block.

    After a timeout, return the blocks that are still held.
    """
    deadline = time.monotonic() + _IDLE_S
    while True:
        wrong = [
            f"{kv.worker}: of {tier.num_blocks} blocks in {KvTier.Name(tier.tier)} "
            f"{tier.num_held} are held, "
            f"{tier.num_shared} by several, {tier.num_cached} cached, {tier.num_free} free; "
            f"{kv.num_sequences} sequences"
            for kv in await client.describe_kv(timeout_s=30)
            for tier in kv.tiers
            if tier.num_free + tier.num_cached + tier.num_retired != tier.num_blocks
            or kv.num_sequences
        ]
        if not wrong or time.monotonic() > deadline:
            return wrong
        await asyncio.sleep(0.2)


def pauses_of(given: argparse.Namespace, chance: random.Random) -> Iterator[float]:
    """Yield the pause before each fault."""
    if given.soak is None:
        for _ in range(given.kills):
            yield chance.uniform(0.2, 2.0)
        return
    started_s = time.monotonic()
    number = 0
    while (now_s := time.monotonic()) < started_s + given.soak:
        number += 1
        yield max(0.0, started_s + number * given.every - now_s)


def print_stalls(run: Run, found: Sequence[Stall]) -> None:
    """Print the stalls that each kind of fault caused."""
    table = Table("fault:<24", "times:d", "stall p50, s:.2f", "p99, s:.2f", "longest, s:.2f")
    for kind, times in sorted(Counter(kind for _, kind in run.faults).items()):
        pauses_s = [stall.stalled_s for stall in found if stall.kind == kind] or [0.0]
        table.row(kind, times, *np.percentile(pauses_s, (50, 99, 100)))
    print("the longest stalls, one per moment; `quire logs --request ID` on --logs shows the cause")
    table = Table("from:<12", "to:<12", "s:.2f", "fault:<24", "streams:d", "request:<32")
    to_clock = time.time() - time.monotonic()
    left = sorted(found, key=lambda stall: -stall.stalled_s)
    for _ in range(_NUM_LONGEST):
        if not left:
            break
        longest = left[0]
        same = [each for each in left if abs(each.ended_at_s - longest.ended_at_s) < _SAME_S]
        left = [each for each in left if each not in same]
        end_s = longest.ended_at_s + to_clock
        table.row(
            _clock(end_s - longest.stalled_s), _clock(end_s), longest.stalled_s, longest.kind,
            len(same), longest.request_id,
        )  # fmt: skip


def _clock(at_s: float) -> str:
    """Return the time of day in UTC, as in the logs."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S.%f")[:-3]


async def run_chaos(given: argparse.Namespace) -> Results:
    """Start the service, inject faults, and return the findings."""
    chance = random.Random(given.seed)
    run = Run()
    num_blocks = _NUM_BLOCKS_CRAMPED if given.cramped else _NUM_BLOCKS
    roles = ("prefill", "decode") if given.roles else ("both", "both")
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as name:
        model = given.model if given.family is None else write_family(Path(name), given.family)
        async with chaos_service(
            Path(name), model, num_blocks, has_standby=given.standby, roles=roles
        ) as service:
            streams = Streams(service.targets)
            try:
                await streams.prepare(make_cases(chance, 12 if given.quick else 24))
                print(f"{given.streams} streams; seed {given.seed}", flush=True)
                async with streams.keep_live(given.streams, chance):
                    await kill_schedulers(service, run, given.scheduler_kills)
                    pauses_s = pauses_of(given, chance)
                    faults = service.draw(chance, 3.0 if given.quick else 10.0, given.only)
                    await do_harm(service, run, chance, pauses_s, faults)
                    await service.wait_until_ready()
                async with AsyncClient(service.targets) as client:
                    run.blocks = await wrong_blocks(client)
            finally:
                await streams.close()
                if given.logs is not None:
                    service.save_logs(given.logs)
    verdict = streams.verdict
    found = list(stalls(streams.finished, run.faults))
    print_stalls(run, found)
    p50, p99 = np.percentile([stall.stalled_s for stall in found] or [0.0], (50, 99))
    of_processes = [stall.stalled_s for stall in found if "link" not in stall.kind]
    for problem in (*verdict.errors, *run.blocks):
        print(f"  wrong: {problem}")
    return {
        "kills": len(run.faults),
        "streams": verdict.num_streams,
        "tokens": verdict.num_tokens,
        "refused": verdict.num_refused,
        "lost": verdict.lost,
        "duplicated": verdict.duplicated,
        "contradicted": verdict.contradicted,
        "wrong_streams": len(verdict.errors),
        "stall_p50_s": round(float(p50), 3),
        "stall_p99_s": round(float(p99), 3),
        "kill_and_stop_stall_p99_s": round(float(np.percentile(of_processes or [0.0], 99)), 3),
        "recomputed_after_scheduler_kill": run.recomputed,
        "blocks_exact": not run.blocks,
    }


async def run_turns(given: argparse.Namespace) -> Results:
    """Kill processes while turns are computed, and return the results of the turns."""
    chance = random.Random(given.seed)
    num_kills = 0
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as name:
        async with chaos_service(
            Path(name), given.model, _NUM_BLOCKS, has_standby=False, keeps_turns=True
        ) as service:
            client = TurnClient(service.urls, chance)
            await client.prepare(6 if given.quick else 24, max_tokens=120)
            asking = asyncio.create_task(client.keep_asking(given.turns, given.streams))
            names = ["scheduler", *service.routers, "worker-0", "worker-1"]
            alone = iter(())
            while not asking.done():
                await asyncio.wait([asking], timeout=given.turn_kills_every)
                if asking.done():
                    break
                num_kills += 1
                name_of_next = next(alone, None)
                if name_of_next is None:  # all at once, and then each alone
                    print(f"  {num_kills:4} {time.strftime('%H:%M:%S')} all killed", flush=True)
                    await service.kill_all()
                    alone = iter(chance.sample(names, len(names)))
                else:
                    print(f"  {num_kills:4} {time.strftime('%H:%M:%S')} {name_of_next} killed")
                    await service.befall(Fault(What.KILLED, name_of_next))
                await service.wait_until_ready()
            await asking
            if given.logs is not None:
                service.save_logs(given.logs)
    verdict = client.verdict
    for problem in (*verdict.lost, *verdict.doubled, *verdict.contradicted):
        print(f"  wrong: {problem}")
    return {
        "kills": num_kills,
        "turns": verdict.num,
        "turns_lost": len(verdict.lost),
        "turns_doubled": len(verdict.doubled),
        "turns_contradicted": len(verdict.contradicted),
    }


async def run_agent(given: argparse.Namespace) -> Results:
    """Kill processes while an agent works, and return whether that changed any byte."""
    chance = random.Random(given.seed)
    results: Results = {"kills": 0, "turns": 0, "breaks": 0, "transcripts_that_differ": 0}
    speedup = _AGENT_SPEEDUP * (8 if given.quick else 1)
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as name:
        model, script = write_model(Path(name), given.agent)
        async with chaos_service(
            Path(name),
            model,
            _NUM_BLOCKS,
            worker_flags=[f"--speedup={speedup}"],
            keeps_turns=True,
            script=script,
        ) as service:
            for api in ("responses", "messages"):
                undisturbed = await Agent(service.urls, api, chance).run()
                agent = Agent(service.urls, api, chance)
                working = asyncio.create_task(agent.run())
                names = itertools.cycle(
                    ("", "router-0", "scheduler", "worker-0", "router-1", "scheduler", "worker-1")
                )
                for killed in names:
                    await asyncio.wait([working], timeout=given.turn_kills_every)
                    if working.done():
                        break
                    at = time.strftime("%H:%M:%S")
                    print(f"  {api}, turn {agent.num_turns}, {at}: {killed or 'all'} killed")
                    results["kills"] += 1
                    if killed:
                        await service.befall(Fault(What.KILLED, killed))
                    else:
                        await service.kill_all()
                    await service.wait_until_ready()
                results["turns"] += agent.num_turns
                results["breaks"] += agent.num_breaks
                transcript = await working
                if transcript != undisturbed:
                    results["transcripts_that_differ"] += 1
                    print(f"  wrong: {api}: {transcript.decode()}\n for {undisturbed.decode()}")
                digest = hashlib.sha256(transcript).hexdigest()[:16]
                print(f"  {api}: {len(transcript)} bytes, sha256 {digest}", flush=True)
                await service.wait_until_ready()
            if given.logs is not None:
                service.save_logs(given.logs)
    return results


def _parse() -> argparse.Namespace:
    parser = arguments(__doc__, quick="stops and silences of 3 s instead of 10, fewer references")
    add = parser.add_argument
    add("--kills", type=int, default=200, help="faults, after the first phase")
    add("--scheduler-kills", type=int, default=5, help="kills in the first phase")
    add("--soak", type=float, metavar="SECONDS", help="time to inject faults, instead of --kills")
    add("--every", type=float, default=15.0, metavar="S", help="seconds between faults of --soak")
    kinds = [f"{kind} {what}" for kind in ("router", "scheduler", "worker") for what in What]
    add("--turns", type=int, metavar="N", help="test N stored responses instead of streams")
    add("--agent", type=int, metavar="N", help="test N turns of an agent instead of streams")
    add(
        "--turn-kills-every",
        type=float,
        metavar="S",
        help="seconds between kills; default: 5 of --turns, 10 of --agent",
    )
    add("--only", choices=kinds, action="append", default=[], help="faults of these kinds alone")
    add("--streams", type=int, default=64, help="live streams")
    add("--seed", type=int, default=0, help="seed of faults and requests")
    add("--cramped", action="store_true", help="little memory, so that sequences are swapped")
    add("--standby", action="store_true", help="a second scheduler stands by for the first")
    add("--roles", action="store_true", help="one worker prefills, the other decodes")
    add("--model", type=Path, default=SHIPPED_MODEL)
    add("--family", choices=KINDS, help="instead of --model: random weights, layers of this kind")
    add("--logs", type=Path, metavar="DIR", help="also copy the processes' logs here")
    return parser.parse_args()


if __name__ == "__main__":
    given = _parse()
    if given.turn_kills_every is None:
        given.turn_kills_every = 5.0 if given.agent is None else 10.0
    measure = run_chaos if given.turns is None else run_turns
    results = main(given, measure if given.agent is None else run_agent)
    for name, value in results.items():
        print(f"  {name:>32}  {value}")
    if given.agent is not None:
        sys.exit(bool(results["transcripts_that_differ"]))
    if given.turns is not None:
        sys.exit(any(value for name, value in results.items() if name.startswith("turns_")))
    must_be_zero = ("lost", "duplicated", "contradicted", "wrong_streams")
    is_exact = results["blocks_exact"]
    if not (given.cramped or given.roles or given.family):
        most = given.scheduler_kills * given.streams * _MAX_RECOMPUTED
        is_exact = is_exact and results["recomputed_after_scheduler_kill"] <= most
    if any(results[name] for name in must_be_zero) or not is_exact:
        sys.exit("tokens, streams or blocks are wrong: see above")
