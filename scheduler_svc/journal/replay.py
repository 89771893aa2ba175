"""Feeds a recording to a new core and checks that it plans the same; watches who is preempted."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import BinaryIO

from contract.step import Plan, StepId
from scheduler_svc.core.config import SchedulerLoad
from scheduler_svc.core.events import Finished, StepEvents
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.journal.core_calls import (
    BeginExport,
    BeginImport,
    Call,
    Cancel,
    CancelSource,
    CoreOrigin,
    Defragment,
    End,
    EndExport,
    EndImport,
    Entry,
    Inherit,
    RecordedPlan,
    Resize,
    Schedule,
    SetMemoryLevel,
    Shrink,
    Submit,
    Update,
    keep_plan,
)
from scheduler_svc.journal.frames import CutOff
from scheduler_svc.journal.recording_wire import read_recording


@dataclass(slots=True)
class Preemption:
    """A running sequence lost its blocks: who, when, why, and what it cost.

    Of a beam search it says the same of the whole, under the sequence that leads it; tokens are
    those of the best beam.
    """

    step_id: int
    """The step that was being planned."""
    num_beams: int
    """Of a search, those that ran; 0: it was none."""
    seq_id: int
    request_id: str
    output_index: int
    arrived: float
    """In the recorder's seconds."""
    num_running: int
    """Sequences that ran, itself included."""
    num_later: int
    """How many of them had been submitted after it."""
    num_blocks_due: int
    """Blocks that the decoding sequences and the beams needed for the step."""
    num_free_blocks: int
    num_held_blocks: int
    """Blocks of sequences that had gone, still held by steps in flight."""
    num_own_blocks: int
    """The length of its block table; and the block that it, a fork, was to copy from."""
    num_freed_blocks: int
    """How many of them became free; the others are shared."""
    num_known_tokens: int
    has_failed_swap_in: bool
    """Why: a block of it cannot be trusted, whatever is free."""
    is_for_memory: bool
    """Why: fewer were to run, for the worker's memory was critical."""
    num_host_blocks: int
    """Host blocks that keep its KV meanwhile; 0: it was dropped."""
    resumed_step_id: int | None = None
    """The step in which it ran again; None: it did not, as far as the recording goes."""
    num_recomputed_tokens: int | None = None
    """Known tokens that it had to compute again, which the prefix cache had not kept."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field that should be the same."""

    name: str
    recorded: object
    replayed: object


@dataclass(frozen=True, slots=True)
class Difference:
    """Where replay and recording part."""

    call_number: int
    """From 1, in the order of the recording."""
    call: Call
    fields: tuple[FieldDifference, ...]
    replayed_plan: RecordedPlan | None
    error: Exception | None
    """What the core raised now."""


@dataclass(slots=True)
class Replay:
    """What a recording was found to be."""

    origin: CoreOrigin
    num_calls: int = 0
    num_requests: int = 0
    num_refused: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_sampled_tokens: int = 0
    max_running: int = 0
    first_now: float | None = None
    last_now: float = 0.0
    finish_reasons: Counter[FinishReason] = field(default_factory=Counter)
    queue_times_s: list[float] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    kept_plan: RecordedPlan | None = None
    """That of the step asked for."""
    load: SchedulerLoad | None = None
    """Of the core after the last call."""
    difference: Difference | None = None
    """The first; nothing after it was replayed."""
    ending: End | CutOff | None = None
    """None: the recording just stops, since its process was killed."""


def replay(file: BinaryIO, keep_step: int | None = None) -> Replay:
    """Replay a recording up to its end, or to the first difference.

    Args:
        file: The recording.
        keep_step: The step whose plan is wanted.

    Raises:
        RecordingError: It is no recording, damaged, or of another format.
    """
    origin, entries = read_recording(file)
    replayer = _Replayer(origin, keep_step)
    replayer.run(entries)
    return replayer.result


class _Replayer:
    def __init__(self, origin: CoreOrigin, keep_step: int | None) -> None:
        self.result = Replay(origin)
        self._keep_step = keep_step
        self._core = Scheduler(origin.config)
        _PreemptionWatch(self._core, self.result.preemptions)
        self._waiting: dict[int, Preemption] = {}  # preempted, not resumed yet, by sequence
        self._num_seen = 0  # preemptions

    def run(self, entries: Iterable[Entry | End | CutOff]) -> None:
        """Make the calls until they end, or one has another answer."""
        for entry in entries:
            if not isinstance(entry, Entry):
                self.result.ending = entry
                break
            self.result.num_calls += 1
            self.result.difference = self._compare(entry)
            if self.result.difference is not None:
                break
        self.result.load = self._core.load()

    def _compare(self, entry: Entry) -> Difference | None:
        plan: Plan | None = None
        error: Exception | None = None
        try:
            plan = self._call(entry.call)
        except Exception as caught:  # noqa: BLE001 - whatever it is, it is compared
            error = caught
        raised = type(error).__name__ if error is not None else ""
        kept = keep_plan(plan) if plan is not None else None
        if entry.raised == raised and entry.plan == kept:
            self._count(entry, kept)
            return None
        return Difference(
            call_number=self.result.num_calls,
            call=entry.call,
            fields=(
                *_differences(entry.plan, kept),
                *([FieldDifference("raised", entry.raised, raised)] * (entry.raised != raised)),
            ),
            replayed_plan=kept,
            error=error,
        )

    def _call(self, call: Call) -> Plan | None:
        match call:
            case Inherit(holdings, now):
                self._core.inherit(holdings, now)
            case Submit(request, now):
                self._core.submit(request, now)
                if (news := self._core.take_adopted()) is not None:
                    self._hear(news)
            case Cancel(source, seq_keys):
                self._hear_finished(self._core.cancel(source, seq_keys))
            case CancelSource(source):
                self._core.cancel_source(source)
            case Defragment():
                self._core.defragment()
            case Shrink(num_blocks):
                self._core.shrink(num_blocks)
            case Resize(num_blocks):
                self._core.resize(num_blocks)
            case SetMemoryLevel(level):
                self._core.set_memory_level(level)
            case Schedule(now, max_paced_tokens, max_prompt_tokens):
                plan = self._core.schedule(now, max_paced_tokens, max_prompt_tokens)
                self._hear_finished(self._core.take_expired())
                self._core.take_reports()
                return plan
            case Update(outcome):
                self._hear(self._core.update(outcome))
            case BeginExport(source, first_seq_key):
                self._core.begin_export(source, first_seq_key)
            case EndExport(export_id, leaves):
                self._core.end_export(export_id, leaves=leaves)
            case BeginImport(moved):
                self._core.begin_import(moved)
            case EndImport(import_id, output_indices):
                self._core.end_import(import_id, output_indices)
        return None

    def _count(self, entry: Entry, plan: RecordedPlan | None) -> None:
        result = self.result
        match entry.call:
            case Inherit(_, now) | Submit(_, now) | Schedule(now):
                result.first_now = now if result.first_now is None else result.first_now
                result.last_now = now
        if isinstance(entry.call, Submit):
            result.num_requests += 1
            result.num_refused += bool(entry.raised)
        for preemption in result.preemptions[self._num_seen :]:
            self._waiting[preemption.seq_id] = preemption
        self._num_seen = len(result.preemptions)
        if plan is None:
            return
        result.num_steps += 1
        result.num_scheduled_tokens += plan.num_scheduled_tokens
        result.max_running = max(result.max_running, self._core.load().num_running)
        if plan.step_id == self._keep_step:
            result.kept_plan = plan
        for new in plan.new_sequences:
            if (resumed := self._waiting.pop(new.seq_id, None)) is not None:
                resumed.resumed_step_id = plan.step_id
                resumed.num_recomputed_tokens = new.num_tokens - new.num_computed_tokens

    def _hear(self, news: StepEvents) -> None:
        self.result.num_sampled_tokens += len(news.token_ids)
        self.result.queue_times_s += [admitted.queue_s for admitted in news.admitted]
        self._hear_finished(news.finished)

    def _hear_finished(self, finished: Iterable[Finished]) -> None:
        self.result.finish_reasons.update(item.reason for item in finished)


class _PreemptionWatch:
    """Notes what the moment was like when a core preempted."""

    def __init__(self, core: Scheduler, preemptions: list[Preemption]) -> None:
        self._core = core
        self._preemptions = preemptions
        core.preemption.observer = self._note

    def _note(self, seq: Sequence, can_swap: bool) -> Callable[[], None]:
        """Note the moment before; what is returned notes what came of it."""
        core = self._core
        assert seq.row is not None
        step = StepId(core.steps.last + 1)
        num_available = core.pool.num_available
        has_too_many = core.preemption.has_too_many
        running = [other for other in core.live if other.row is not None]
        leader, own = (seq, [seq]) if seq.group is None else (seq.group.leader, seq.group.places)
        own = list(own)
        later = [other for other in running if other.seq_id > seq.seq_id and other not in own]
        preemption = Preemption(
            step_id=step,
            num_beams=0 if seq.group is None else len(own),
            seq_id=leader.seq_id,
            request_id=seq.request.request_id,
            output_index=leader.output_index,
            arrived=seq.arrived,
            num_running=len(running),
            num_later=len(later),
            num_blocks_due=core.preemption.num_blocks_due(step),
            num_free_blocks=num_available,
            num_held_blocks=len(set(core.steps.held_blocks)),
            num_own_blocks=len({block for each in own for block in each.block_ids})
            + (seq.copy_from is not None),
            num_freed_blocks=0,
            num_known_tokens=core.rows.num_tokens(seq.row),
            has_failed_swap_in=not can_swap and not has_too_many,
            is_for_memory=has_too_many,
            num_host_blocks=0,
        )

        def done() -> None:
            preemption.num_host_blocks = len(seq.host_block_ids)
            preemption.num_freed_blocks = core.pool.num_available - num_available
            self._preemptions.append(preemption)

        return done


def _differences(
    recorded: RecordedPlan | None, replayed: RecordedPlan | None
) -> list[FieldDifference]:
    if recorded is None or replayed is None:
        return [FieldDifference("plan", recorded, replayed)] * (recorded is not replayed)
    return [
        FieldDifference(each.name, before, now)
        for each in fields(recorded)
        if (before := getattr(recorded, each.name)) != (now := getattr(replayed, each.name))
    ]
