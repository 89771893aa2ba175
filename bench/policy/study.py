"""Sends a recording's requests to a core with another policy, and compares when each is served.

Another policy puts other sequences into the rows, so the recorded results cannot be replayed.
Instead, the worker is simulated under these assumptions:

- Requests arrive at the recorded times. Refused requests are left out, because their outputs are
  not known.
- A sequence produces its recorded tokens. If it ended by a stop token or its length, it ends there.
  If it was cancelled, failed, or still ran when the recording stopped, it is cancelled when it has
  as many tokens as were recorded; if none were, it is cancelled at the recorded time.
- Prompts are paced by `step_pacer`, with the last recorded estimates of step times.
- A step takes `a + b * tokens`, with `a` and `b` from the recorded steps (`step_times`). Moves
  between device and host take the bandwidth that the worker had measured. Nothing fails.

The recorded policy is simulated as well. The difference between its simulation and the recording is
the error of these assumptions; the difference between the two simulations is the policy's effect.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import BinaryIO, NamedTuple

from policy.step_times import StepTimes, StepTimeSamples
from policy.worker import Draw, SimulatedRow, SimulatedWorker

from contract.step import Plan, Result
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.errors import RequestRefusedError
from scheduler_svc.core.interface.events import Finished, StepEvents
from scheduler_svc.core.interface.request import FinishReason, Request, SeqKey, SourceId
from scheduler_svc.core.pacing import least_tokens
from scheduler_svc.core.reports.load import read_prompts
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal.entries import (
    CutOff,
    JournalEntry,
    Origin,
    RecordingError,
    decode_arguments,
    read_recording,
)

_BY_ITSELF = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE})
"""Finish reasons that the simulation reproduces from tokens alone."""


_NOT_STUDIED = {
    "inherit": "sequences taken over from an earlier scheduler",
    "set_memory_level": "steps with too little memory at the worker",
    "shrink": "a change of the pool's size",
    "resize": "a change of the pool's size",
    "begin_export": "requests that moved between workers",
    "end_export": "requests that moved between workers",
    "lend": "blocks that were copied between workers",
    "end_loan": "blocks that were copied between workers",
    "expect": "blocks that were copied between workers",
    "receive": "blocks that were copied between workers",
    "begin_import": "requests that moved between workers",
    "end_import": "requests that moved between workers",
}


class SeqName(NamedTuple):
    """A sequence's name at its router: request and output index."""

    source: int
    seq_key: int


@dataclass(slots=True)
class SequenceHistory:
    """The times of a sequence's events, in seconds after its request arrived."""

    request_id: str
    output_index: int
    arrived: float
    """Arrival time, by the recorder's clock."""
    token_ids: list[int]
    """The sequence's output, including tokens from before it was submitted to this core."""
    queue_s: float | None = None
    """How long the sequence waited; None: this core never admitted it."""
    first_token_s: float | None = None
    finished_s: float | None = None
    reason: FinishReason | None = None


@dataclass(slots=True)
class Run:
    """The histories of all sequences under one policy."""

    sequences: dict[SeqName, SequenceHistory] = field(default_factory=dict)
    num_refused: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0

    def add_request(self, request: Request, now: float) -> None:
        """Record that a request was accepted."""
        for index in range(request.n):
            if request.outputs and request.outputs[index].finished:
                continue
            known = request.outputs[index].token_ids.tolist() if request.outputs else []
            name = SeqName(request.source, request.first_seq_key + index)
            self.sequences[name] = SequenceHistory(request.request_id, index, now, known)

    def add_events(self, events: StepEvents, now: float) -> None:
        """Record the events of a step."""
        arrays = (events.sources, events.seq_keys, events.token_ids)
        for source, key, token_id in zip(*(array.tolist() for array in arrays), strict=True):
            seq = self.sequences[SeqName(source, key)]
            seq.token_ids.append(token_id)
            if seq.first_token_s is None:
                seq.first_token_s = now - seq.arrived
        for admitted in events.admitted:
            self.sequences[SeqName(admitted.source, admitted.seq_key)].queue_s = admitted.queue_s
        self.end(events.finished, now)

    def end(self, finished: Iterable[Finished], now: float) -> None:
        """Record the ends of sequences."""
        for item in finished:
            seq = self.sequences[SeqName(item.source, item.seq_key)]
            seq.finished_s, seq.reason = now - seq.arrived, item.reason

    def count(self, core: Scheduler) -> None:
        """Store the core's counters, at the end."""
        load = core.load()
        self.num_steps = load.num_steps
        self.num_preemptions = load.num_preemptions
        self.num_recomputed_tokens = load.num_recomputed_tokens


@dataclass(frozen=True, slots=True)
class Study:
    """A recording, and its simulations under two policies."""

    origin: Origin
    config: SchedulerConfig
    policy: str
    policy_args: tuple[tuple[str, str], ...]
    step_times: StepTimes
    recorded: Run
    control: Run
    """The simulation of the recorded policy."""
    other: Run
    """The simulation of the other policy."""


def study(file: BinaryIO, policy: str, policy_args: tuple[tuple[str, str], ...]) -> Study:
    """Simulate a recording's requests under its own policy, and under another.

    Raises:
        RecordingError: The file is no recording, is damaged or in another format; this release's
            core plans differently; the recording is too short to estimate step times; or requests
            moved between workers.
    """
    recorded = read_recording(file)
    recording = _Recording(recorded.config)
    for entry in recorded.entries:
        if not isinstance(entry, CutOff) and entry.call:
            recording.add(entry)
    recording.run.count(recording.core)
    step_times = recording.step_times.fit()
    if step_times is None:
        raise RecordingError("it is too short to estimate how long a step takes")
    other = replace(recorded.config, policy=policy, policy_args=policy_args)
    return Study(
        origin=recorded.origin,
        config=recorded.config,
        policy=policy,
        policy_args=policy_args,
        step_times=step_times,
        recorded=recording.run,
        control=_Simulation(recorded.config, recording, step_times).run_all(),
        other=_Simulation(other, recording, step_times).run_all(),
    )


class _Recording:
    """Replays a recording on a core, to collect the history of each sequence."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.core = Scheduler(config)
        self.run = Run()
        self.step_times = StepTimeSamples()
        self.requests: list[tuple[float, Request]] = []
        self.cut_off: dict[SeqName, float] = {}
        """When a sequence was cancelled or failed."""
        self.now = 0.0
        self.tokens_in_time: int | None = None
        """The last recorded bound on prompt tokens beside decodes; None: there was none."""
        self.max_prompt_tokens: int | None = None
        """The last recorded bound on a step's prompt tokens."""

    def add(self, entry: JournalEntry) -> None:
        """Replay the next call."""
        try:
            self._call(entry)
        except RecordingError:
            raise
        except Exception as error:
            raise RecordingError(
                f"this release's core does not follow it ({error}); quire replay FILE shows where"
            ) from error

    def _call(self, entry: JournalEntry) -> None:
        given = decode_arguments(entry)
        self.now = given.get("now", entry.at)
        match entry.call:
            case "submit":
                if entry.raised:
                    self.run.num_refused += 1
                    return
                self.core.submit(**given)
                self.requests.append((self.now, given["request"]))
                self.run.add_request(given["request"], self.now)
            case "schedule":
                bound = given["max_paced_tokens"]
                if bound is not None:
                    is_for_decodes = bound > least_tokens(read_prompts(self.core), self.core.config)
                    self.tokens_in_time = bound if is_for_decodes else self.tokens_in_time or 0
                self.max_prompt_tokens = given["max_prompt_tokens"]
                plan = self.core.schedule(**given)
                self.run.end(self.core.take_expired(), self.now)
                self.core.defragmenter.take_reports()
                if plan is not None:
                    self.step_times.sent(plan)
            case "update":
                (result,) = given.values()
                self.step_times.answered(result.step_id, self.now)
                self.run.add_events(self.core.update(result), self.now)
            case "cancel":
                self._cut_off(self.core.cancel(**given))
            case "cancel_source":
                source = given["source"]
                live = [name for name, seq in self.run.sequences.items() if seq.reason is None]
                keys = [SeqKey(name.seq_key) for name in live if name.source == source]
                self._cut_off(self.core.cancel(source, keys))
            case "defragment":  # moves blocks, and changes no token
                self.core.defragment()
            case name:
                raise RecordingError(f"it has {_NOT_STUDIED[name]}, which another policy changes")

    def _cut_off(self, finished: Iterable[Finished]) -> None:
        ends = tuple(finished)
        self.run.end(ends, self.now)
        self.cut_off.update((SeqName(end.source, end.seq_key), self.now) for end in ends)


class _Simulation:
    """Runs the requests of a recording on a core with a policy, with two steps in flight."""

    def __init__(
        self, config: SchedulerConfig, recording: _Recording, step_times: StepTimes
    ) -> None:
        self._core = Scheduler(config)
        self._recording = recording
        self._step_times = step_times
        self._worker = SimulatedWorker(self._draw)
        self._names: dict[int, SeqName] = {}  # by sequence, as this core numbers them
        self._run = Run()
        self._in_flight: deque[tuple[float, Result]] = deque()
        self._free_at = 0.0
        self._to_cancel = {
            name: history
            for name, history in recording.run.sequences.items()
            if history.reason not in _BY_ITSELF
        }
        """Sequences that must be cancelled when they have as many tokens as were recorded."""

    def run_all(self) -> Run:
        """Run until all sequences have ended."""
        calls = self._calls()
        while True:
            now = self._next_time(calls)
            if now is None:
                break
            while calls and calls[0][0] <= now:
                self._submit_or_cancel(heapq.heappop(calls)[2], now)
            while self._in_flight and self._in_flight[0][0] <= now:
                self._record(self._core.update(self._in_flight.popleft()[1]), now)
            self._plan(now)
        self._run.count(self._core)
        return self._run

    def _calls(self) -> list[tuple[float, int, Request | SeqName]]:
        """Return the arrivals and cancellations with their times, as a heap."""
        recording = self._recording
        calls: list[tuple[float, Request | SeqName]] = [*recording.requests]
        for name, history in self._to_cancel.items():
            if history.first_token_s is None:  # it has no token
                calls.append((recording.cut_off.get(name, recording.now), name))
        heap = [(when, number, call) for number, (when, call) in enumerate(calls)]
        heapq.heapify(heap)
        return heap

    def _next_time(self, calls: list[tuple[float, int, Request | SeqName]]) -> float | None:
        times = [self._in_flight[0][0]] if self._in_flight else []
        if calls:
            times.append(calls[0][0])
        return min(times, default=None)

    def _submit_or_cancel(self, call: Request | SeqName, now: float) -> None:
        if isinstance(call, SeqName):
            self._cancel(call, now)
            return
        try:
            self._core.submit(call, now)
        except RequestRefusedError:
            self._run.num_refused += 1
        else:
            self._run.add_request(call, now)

    def _cancel(self, name: SeqName, now: float) -> None:
        self._run.end(self._core.cancel(SourceId(name.source), [name.seq_key]), now)

    def _plan(self, now: float) -> None:
        most = self._recording.max_prompt_tokens
        while (plan := self._core.schedule(now, self._max_paced_tokens(), most)) is not None:
            self._remember_names(plan)
            outcome = self._worker.execute(plan)
            self._free_at = max(now, self._free_at) + self._step_times.seconds(
                plan, self._core.config
            )
            self._in_flight.append((self._free_at, outcome))
        self._run.end(self._core.take_expired(), now)
        self._core.defragmenter.take_reports()

    def _max_paced_tokens(self) -> int | None:
        in_time = self._recording.tokens_in_time
        if in_time is None:
            return None
        return max(in_time, least_tokens(read_prompts(self._core), self._core.config))

    def _remember_names(self, plan: Plan) -> None:
        for new in plan.new_sequences:
            if (owner := self._core.owner(new.row)) is not None:
                self._names[new.seq_id] = SeqName(*owner)

    def _record(self, events: StepEvents, now: float) -> None:
        self._run.add_events(events, now)
        owners = zip(events.sources.tolist(), events.seq_keys.tolist(), strict=True)
        for name in {SeqName(*pair) for pair in owners} & self._to_cancel.keys():
            history = self._run.sequences[name]
            num_tokens = len(self._to_cancel[name].token_ids)
            if history.reason is None and len(history.token_ids) >= num_tokens:
                self._cancel(name, now)

    def _draw(self, row: SimulatedRow) -> Draw:
        history = self._recording.run.sequences[self._names[row.new.seq_id]]
        token_ids, index = history.token_ids, row.num_outputs
        if index >= len(token_ids):  # it is being cancelled
            return Draw(0)
        is_last = history.reason is FinishReason.STOP and index == len(token_ids) - 1
        return Draw(token_ids[index], is_last)
