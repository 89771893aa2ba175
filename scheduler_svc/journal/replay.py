"""Replays a recording with a new core, compares the plans, and describes preemptions."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from contract.step import Plan, StepId
from scheduler_svc.core.interface.config import SchedulerLoad
from scheduler_svc.core.interface.events import Finished, StepEvents
from scheduler_svc.core.interface.request import FinishReason
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.journal.entries import (
    CutOff,
    JournalEntry,
    Recording,
    decode_arguments,
    describe_plan,
    read_recording,
)


@dataclass(slots=True)
class ReplayedPreemption:
    """A preemption: the sequence, the step, the reason and the cost.

    A beam search is preempted as a whole. For a search, `seq_id` and `output_index` are those of
    the leader, numbers of blocks count the blocks of all beams, and numbers of tokens count the
    tokens of one beam.
    """

    step_id: int
    """The step that the core was planning when it preempted the sequence."""
    num_beams: int
    """Number of running beams; 0 if the sequence was not a beam search."""
    seq_id: int
    request_id: str
    output_index: int
    arrived: float
    """When the sequence was submitted, on the recorded clock."""
    num_running: int
    """Number of running sequences, including the preempted one."""
    num_later: int
    """Number of running sequences that were submitted after the preempted one."""
    num_blocks_due: int
    """New blocks that the running sequences needed for the step."""
    num_free_blocks: int
    num_held_blocks: int
    """Blocks of ended sequences that steps in flight still held."""
    num_own_blocks: int
    """Blocks that the sequence held: the blocks in its block table. Right after a fork, it also
    held those blocks of its parent that the worker had yet to copy for it."""
    num_freed_blocks: int
    """How many of the `num_own_blocks` became available; other sequences share the rest."""
    num_known_tokens: int
    has_failed_swap_in: bool
    """Whether the reason was a failed swap-in: a block of the sequence was corrupt on the host."""
    is_for_memory: bool
    """Whether the reason was that the worker's memory was short."""
    num_host_blocks: int
    """Host blocks that keep the sequence's KV; 0: the KV was dropped."""
    resumed_step_id: int | None = None
    """The step in which the sequence resumed; None: it did not resume in the recording."""
    num_recomputed_tokens: int | None = None
    """Known tokens that were recomputed; the other tokens were cached or swapped out."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call whose result differs from the recorded one."""

    number: int
    """The number of the call in the recording, from 1."""
    entry: JournalEntry
    arguments: dict[str, Any]
    fields: dict[str, tuple[object, object]]
    """The fields of the plan that differ, each with the recorded and the replayed value."""
    replayed_plan: dict[str, Any] | None
    error: Exception | None
    """The exception that the core raised in the replay."""


@dataclass(slots=True)
class Replay:
    """The result of a replay."""

    recording: Recording
    num_calls: int = 0
    num_requests: int = 0
    num_refused: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_sampled_tokens: int = 0
    max_running: int = 0
    first_now: float | None = None
    """The first `now` in the recording."""
    last_now: float = 0.0
    finish_reasons: Counter[FinishReason] = field(default_factory=Counter)
    queue_times_s: list[float] = field(default_factory=list)
    preemptions: list[ReplayedPreemption] = field(default_factory=list)
    kept_plan: dict[str, Any] | None = None
    """The plan of the step `keep_step` (see `replay`); None: this step was not replayed."""
    load: SchedulerLoad | None = None
    """The load of the core after the last call."""
    difference: Difference | None = None
    """The first difference, if any; later calls were not replayed."""
    ending: str | CutOff | None = None
    """Why the recording ended. A `CutOff`: the process was killed while it wrote a frame. None: the
    process was killed between two frames, or the replay stopped at the first difference."""


def replay(file: BinaryIO, keep_step: int | None = None) -> Replay:
    """Replay a recording up to its end, or to the first difference.

    Args:
        file: The recording.
        keep_step: The step whose plan to return as `kept_plan`; None: keep no plan.

    Raises:
        RecordingError: The file is not a recording, is damaged, or has another format version.
    """
    return _Replayer(read_recording(file), keep_step).run()


class _Replayer:
    def __init__(self, recording: Recording, keep_step: int | None) -> None:
        self._result = Replay(recording)
        self._keep_step = keep_step
        self._core = Scheduler(recording.config)
        _PreemptionWatch(self._core, self._result.preemptions)
        self._preempted: dict[int, ReplayedPreemption] = {}  # by sequence, until it resumes
        self._num_seen = 0  # preemptions that `_count` has processed

    def run(self) -> Replay:
        """Repeat the recorded calls up to the last call, or to the first whose result differs."""
        result = self._result
        for entry in result.recording.entries:
            if isinstance(entry, CutOff) or not entry.call:
                result.ending = entry if isinstance(entry, CutOff) else entry.raised
                break
            result.num_calls += 1
            result.difference = self._compare(entry)
            if result.difference is not None:
                break
        result.load = self._core.load()
        return result

    def _compare(self, entry: JournalEntry) -> Difference | None:
        arguments = decode_arguments(entry)
        plan: Plan | None = None
        error: Exception | None = None
        try:
            plan = self._call(entry.call, arguments)
        except Exception as caught:  # noqa: BLE001 - every error is compared with the recorded one
            error = caught
        raised = type(error).__name__ if error is not None else ""
        described = describe_plan(plan) if plan is not None else None
        different = _differences(entry.plan, described)
        if entry.raised != raised:
            different["raised"] = (entry.raised, raised)
        if different:
            number = self._result.num_calls
            return Difference(number, entry, arguments, different, described, error)
        self._count(entry, arguments.get("now"), plan, described)
        return None

    def _call(self, name: str, arguments: dict[str, Any]) -> Plan | None:
        answer = getattr(self._core, name)(**arguments)
        match name:
            case "schedule":
                self._count_finished(self._core.take_expired())
                self._core.defragmenter.take_reports()
                return answer if isinstance(answer, Plan) else None
            case "submit":
                if (events := self._core.takeover.take_adopted()) is not None:
                    self._count_events(events)
            case "update":
                self._count_events(answer)
            case "cancel":
                self._count_finished(answer)
        return None

    def _count(
        self,
        entry: JournalEntry,
        now: float | None,
        plan: Plan | None,
        described: dict[str, Any] | None,
    ) -> None:
        result = self._result
        if now is not None:
            result.first_now = now if result.first_now is None else result.first_now
            result.last_now = now
        if entry.call == "submit":
            result.num_requests += 1
            result.num_refused += bool(entry.raised)
        for preemption in result.preemptions[self._num_seen :]:
            self._preempted[preemption.seq_id] = preemption
        self._num_seen = len(result.preemptions)
        if plan is None:
            return
        result.num_steps += 1
        result.num_scheduled_tokens += plan.num_scheduled_tokens
        result.max_running = max(result.max_running, self._core.load().num_running)
        if plan.step_id == self._keep_step:
            result.kept_plan = described
        for new in plan.new_sequences:
            if (resumed := self._preempted.pop(new.seq_id, None)) is not None:
                resumed.resumed_step_id = plan.step_id
                resumed.num_recomputed_tokens = len(new.token_ids) - new.num_computed_tokens

    def _count_events(self, events: StepEvents) -> None:
        self._result.num_sampled_tokens += len(events.token_ids)
        self._result.queue_times_s += [admitted.queue_s for admitted in events.admitted]
        self._count_finished(events.finished)

    def _count_finished(self, finished: Iterable[Finished]) -> None:
        self._result.finish_reasons.update(item.reason for item in finished)


class _PreemptionWatch:
    """Describes each preemption by the core's state before and after the preemption."""

    def __init__(self, core: Scheduler, preemptions: list[ReplayedPreemption]) -> None:
        self._core = core
        self._preemptions = preemptions
        core.preemption.observer = self._describe

    def _describe(self, seq: Sequence, can_swap: bool) -> Callable[[], None]:
        """Describe the state before a preemption; the returned function adds the outcome."""
        core = self._core
        assert seq.row is not None
        step = StepId(core.steps.last + 1)
        num_available = core.pool.num_available
        has_too_many = core.preemption.has_too_many
        running = [other for other in core.live if other.row is not None]
        leader, own = (seq, [seq]) if seq.group is None else (seq.group.leader, seq.group.places)
        own = list(own)
        later = [other for other in running if other.seq_id > seq.seq_id and other not in own]
        preemption = ReplayedPreemption(
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
            + len(seq.copy_from),
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
    recorded: dict[str, Any] | None, replayed: dict[str, Any] | None
) -> dict[str, tuple[object, object]]:
    if recorded is None or replayed is None:
        return {} if recorded is replayed else {"plan": (recorded, replayed)}
    names = [*recorded, *(replayed.keys() - recorded.keys())]
    return {
        name: (recorded.get(name), replayed.get(name))
        for name in names
        if recorded.get(name) != replayed.get(name)
    }
