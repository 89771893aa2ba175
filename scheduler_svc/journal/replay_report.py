"""A replay in words: the first difference, the summary, each preemption, a plan in full."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime

from scheduler_svc.journal.core_calls import (
    BeginExport,
    BeginImport,
    Cancel,
    CancelSource,
    Defragment,
    End,
    EndExport,
    EndImport,
    Inherit,
    RecordedPlan,
    Resize,
    Schedule,
    SetMemoryLevel,
    Shrink,
    Submit,
    Update,
)
from scheduler_svc.journal.frames import CutOff
from scheduler_svc.journal.replay import Difference, Preemption, Replay


def describe(replay: Replay) -> Iterator[str]:
    """Yield the lines of the whole report."""
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


def describe_plan(plan: RecordedPlan) -> Iterator[str]:
    """Yield the lines of a plan, field by field, sequences one by one."""
    for each in fields(plan):
        value = getattr(plan, each.name)
        if each.name == "new_sequences":
            yield f"  new_sequences: {len(value)}"
            for new in value:
                yield (
                    f"    sequence {new.seq_id} in row {new.row}: {new.num_computed_tokens} of its "
                    f"{new.num_tokens} tokens computed, blocks {_list(new.block_ids)}"
                )
        else:
            yield f"  {each.name}: {_list(value) if isinstance(value, tuple) else value}"


def _describe_origin(replay: Replay) -> Iterator[str]:
    origin, config = replay.origin, replay.origin.config
    started = datetime.fromtimestamp(origin.started_at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield (
        f"worker {origin.worker_id}, epoch {origin.epoch}, from {started}, "
        f"by Quire {origin.quire_version}"
    )
    yield ", ".join(f"{each.name} {getattr(config, each.name)}" for each in fields(config))


def _describe_difference(difference: Difference) -> Iterator[str]:
    yield f"DIFFERENT at call {difference.call_number}, {_name_call(difference)}:"
    for each in difference.fields:
        yield f"  {each.name}"
        yield f"    recorded: {_show(each.recorded)}"
        yield f"    replayed: {_show(each.replayed)}"
    if difference.error is not None:
        yield f"  the core raised {type(difference.error).__name__}: {difference.error}"
    if difference.replayed_plan is not None:
        yield "the replayed plan in full:"
        yield from describe_plan(difference.replayed_plan)


def _name_call(difference: Difference) -> str:
    match difference.call:
        case Submit(request, now):
            return f"submit of request {request.request_id!r} at {now:.6f} s"
        case Inherit(holdings):
            return f"inherit, with {len(holdings.rows)} sequences"
        case Cancel(source, seq_keys):
            return f"cancel of {_list(seq_keys)} of source {source}"
        case CancelSource(source):
            return f"cancel of source {source}"
        case Defragment():
            return "defragment"
        case Shrink(num_blocks):
            return f"shrink to {num_blocks} blocks"
        case Resize(num_blocks):
            return f"resize to {num_blocks} blocks"
        case SetMemoryLevel(level):
            return f"set_memory_level to {level.name}"
        case Schedule(now):
            return f"schedule at {now:.6f} s"
        case Update(outcome):
            return f"update with the result of step {outcome.step_id}"
        case BeginExport(source, first_seq_key):
            return f"begin_export of the request at {first_seq_key} of source {source}"
        case EndExport(export_id, leaves):
            return f"end_export {export_id}, which {'leaves' if leaves else 'stays'}"
        case BeginImport(moved):
            return f"begin_import of request {moved.request.request_id!r}"
        case EndImport(import_id, output_indices):
            return f"end_import {import_id} with outputs {_list(output_indices)}"


def _describe_ending(replay: Replay) -> str:
    match replay.ending:
        case _ if replay.difference is not None:
            return "what follows was not replayed; below is what led there"
        case End(reason):
            return f"it ends there: {reason}"
        case CutOff(num_bytes):
            return (
                f"it is cut off: its last frame has {num_bytes} bytes and not all, "
                "since its process was killed"
            )
        case None:
            return "it has no end, since its process was killed"


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
    # quantiles() wants two values
    cuts = statistics.quantiles([*times_s, times_s[-1]], n=100, method="inclusive")
    return (
        f"median {cuts[49]:.3f} s, 90 % {cuts[89]:.3f} s, 99 % {cuts[98]:.3f} s, "
        f"most {max(times_s):.3f} s"
    )


def _reason(it: Preemption) -> str:
    if it.is_for_memory:
        return "the worker's memory was critical, and too many ran"
    if it.has_failed_swap_in:
        return "a block that was swapped in for it is not what was swapped out"
    missing = it.num_blocks_due - it.num_free_blocks
    return (
        f"the running sequences needed {_blocks(it.num_blocks_due)}, {it.num_free_blocks} were "
        f"free, {it.num_held_blocks} more held by steps in flight: {missing} too few"
    )


def _describe_preemption(number: int, it: Preemption, replay: Replay) -> Iterator[str]:
    what = f"a search, with {it.num_beams} beams," if it.num_beams else f"output {it.output_index}"
    yield (
        f"preemption {number}, planning step {it.step_id}: sequence {it.seq_id}, "
        f"{what} of request {it.request_id!r}"
    )
    yield f"  why:   {_reason(it)}"
    arrived = it.arrived - (replay.first_now or 0.0)
    came = f"{it.num_later} came later, but rank before it" if it.num_later else "it came last"
    yield f"  who:   of {it.num_running} running {came}; it arrived at {arrived:.3f} s"
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


def _list(values: Sequence[int]) -> str:
    return "[" + " ".join(map(str, values)) + "]"


def _show(value: object) -> str:
    if value is None:
        return "none"
    return _list(value) if isinstance(value, tuple) and _all_ints(value) else str(value)


def _all_ints(values: tuple[object, ...]) -> bool:
    return all(isinstance(value, int) for value in values)
