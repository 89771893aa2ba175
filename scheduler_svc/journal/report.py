"""Describes a replay in words: the first difference, totals, each preemption, and plans."""

import statistics
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from scheduler_svc.journal.entries import CutOff
from scheduler_svc.journal.replay import Difference, Replay, ReplayedPreemption


def describe(replay: Replay) -> Iterator[str]:
    yield from _describe_origin(replay)
    if replay.difference is not None:
        yield from _describe_difference(replay.difference)
    else:
        yield f"every plan is the same: {replay.num_steps} steps, {replay.num_calls} calls"
    yield _describe_ending(replay)
    yield ""
    yield from _describe_totals(replay)
    for number, preemption in enumerate(replay.preemptions, 1):
        yield ""
        yield from _describe_preemption(number, preemption, replay)


def plan_lines(plan: dict[str, Any]) -> Iterator[str]:
    """Yield lines that describe a plan: one for each field, and one for each new sequence."""
    for name, value in plan.items():
        if name == "new_sequences":
            yield f"  new_sequences: {len(value)}"
            for new in value:
                yield (
                    f"    sequence {new['seq_id']} in row {new['row']}: "
                    f"{new['num_computed_tokens']} of its {new['num_tokens']} tokens computed, "
                    f"blocks {_show(new['block_ids'])}"
                )
        else:
            yield f"  {name}: {_show(value)}"


def _describe_origin(replay: Replay) -> Iterator[str]:
    origin = replay.recording.origin
    started = datetime.fromtimestamp(origin.started_at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield (
        f"worker {origin.worker_id}, epoch {origin.epoch}, from {started}, "
        f"by Quire {origin.quire_version}"
    )
    yield ", ".join(f"{name} {value}" for name, value in origin.config.items())


def _describe_difference(difference: Difference) -> Iterator[str]:
    yield f"DIFFERENT at call {difference.number}, {_describe_call(difference)}:"
    for name, (recorded, replayed) in difference.fields.items():
        yield f"  {name}"
        yield f"    recorded: {_show(recorded)}"
        yield f"    replayed: {_show(replayed)}"
    if difference.error is not None:
        yield f"  the core raised {type(difference.error).__name__}: {difference.error}"
    if difference.replayed_plan is not None:
        yield "the replayed plan in full:"
        yield from plan_lines(difference.replayed_plan)


def _describe_call(difference: Difference) -> str:
    name, arguments = difference.entry.call, difference.arguments
    match name:
        case "submit":
            request = arguments["request"]
            return f"submit of request {request.request_id!r} at {arguments['now']:.6f} s"
        case "schedule":
            return f"schedule at {arguments['now']:.6f} s"
        case "update":
            (result,) = arguments.values()
            return f"update with the result of step {result.step_id}"
        case "inherit":
            return f"inherit of {len(arguments['holdings'].rows)} sequences"
        case "begin_import":
            return f"begin_import of request {arguments['moved'].request.request_id!r}"
        case _:
            shown = ", ".join(f"{key} {_show(value)}" for key, value in arguments.items())
            return f"{name} with {shown}" if shown else name


def _describe_ending(replay: Replay) -> str:
    match replay.ending:
        case _ if replay.difference is not None:
            return "later calls were not replayed; the totals cover the calls before"
        case str() as reason:
            return f"the recording ends because: {reason}"
        case CutOff(num_bytes):
            return (
                f"the recording is cut off: its last frame has only {num_bytes} bytes, "
                "because its process was killed"
            )
        case None:
            return "the recording has no end, because its process was killed"


def _describe_totals(replay: Replay) -> Iterator[str]:
    first = replay.last_now if replay.first_now is None else replay.first_now
    load = replay.load
    assert load is not None
    ends = ", ".join(f"{count} {reason.name}" for reason, count in replay.finish_reasons.items())
    yield f"time        {replay.last_now - first:.3f} s"
    yield (
        f"steps       {replay.num_steps}, "
        f"with {_ratio(replay.num_scheduled_tokens, replay.num_steps):.1f} tokens on average"
    )
    yield f"requests    {replay.num_requests}, of which {replay.num_refused} were refused"
    yield (
        f"sequences   ended: {ends or 'none'}; at most {replay.max_running} ran; at the end "
        f"{load.num_running} run and {load.num_waiting} wait"
    )
    yield (
        f"tokens      {replay.num_scheduled_tokens} computed, {replay.num_sampled_tokens} sampled"
    )
    recomputed = sum(each.num_recomputed_tokens or 0 for each in replay.preemptions)
    yield f"preemptions {len(replay.preemptions)}, {recomputed} tokens computed again"
    yield (
        f"prefixes    {load.prefix_cache_hits} of {load.prefix_cache_queries} tokens found in the "
        f"cache, {_ratio(load.prefix_cache_hits, load.prefix_cache_queries):.1%}"
    )
    yield f"queue time  {_describe_times(replay.queue_times_s)}"


def _describe_times(times_s: Sequence[float]) -> str:
    if not times_s:
        return "nothing was admitted"
    # quantiles() needs at least two values.
    cuts = statistics.quantiles([*times_s, times_s[-1]], n=100, method="inclusive")
    return (
        f"median {cuts[49]:.3f} s, 90 % {cuts[89]:.3f} s, 99 % {cuts[98]:.3f} s, "
        f"most {max(times_s):.3f} s"
    )


def _reason(it: ReplayedPreemption) -> str:
    if it.is_for_memory:
        return "the worker's memory was critical and too many sequences ran"
    if it.has_failed_swap_in:
        return "a block that was swapped in for it was corrupt"
    missing = it.num_blocks_due - it.num_free_blocks
    return (
        f"the running sequences needed {_blocks(it.num_blocks_due)}, but only {it.num_free_blocks} "
        f"were free ({missing} too few); steps in flight held {it.num_held_blocks}"
    )


def _describe_preemption(number: int, it: ReplayedPreemption, replay: Replay) -> Iterator[str]:
    what = f"a search, with {it.num_beams} beams," if it.num_beams else f"output {it.output_index}"
    yield (
        f"preemption {number}, planning step {it.step_id}: sequence {it.seq_id}, "
        f"{what} of request {it.request_id!r}"
    )
    yield f"  why:   {_reason(it)}"
    arrived = it.arrived - (replay.first_now or 0.0)
    order = (
        f"{it.num_later} arrived later but rank before it" if it.num_later else "it arrived last"
    )
    yield f"  who:   of {it.num_running} running sequences {order}; it arrived at {arrived:.3f} s"
    yield (
        f"  gain:  {it.num_freed_blocks} of its {_blocks(it.num_own_blocks)} became free; "
        "the others are shared"
        if it.num_freed_blocks < it.num_own_blocks
        else f"  gain:  its {_blocks(it.num_own_blocks)} became free"
    )
    if it.resumed_step_id is None:
        yield f"  cost:  it had {it.num_known_tokens} tokens, and did not run again"
    else:
        kept = it.num_known_tokens - (it.num_recomputed_tokens or 0)
        yield (
            f"  cost:  {it.num_recomputed_tokens} tokens computed again from step "
            f"{it.resumed_step_id} on; {kept} of its {it.num_known_tokens} were "
            + (
                f"kept in {it.num_host_blocks} host blocks"
                if it.num_host_blocks
                else "still cached"
            )
        )


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _show(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
        return "[" + " ".join(map(str, value)) + "]"
    return str(value)
