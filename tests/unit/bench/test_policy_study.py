"""A recording with known step times, simulated under its own policy and another."""

import heapq
import io
import math
from collections import deque

import numpy as np
import pytest
from policy.report import describe_study
from policy.study import SeqName, study
from policy.worker import Draw, SimulatedRow, SimulatedWorker

from contract.info import WorkerInfo
from contract.step import Result
from contract.worker_limits import Limits
from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.interface.request import FinishReason, Request, SeqKey, SourceId
from scheduler_svc.journal.entries import RecordingError
from scheduler_svc.journal.record import Recordings

STEP_S, TOKEN_S = 0.01, 0.001
INFO = WorkerInfo("w", "none", "m", Limits(4, 128, 32, 40, 4, 50), (), 0, "")
CONFIG = SchedulerConfig(
    num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128
)


def make_request(key, num_prompt_tokens=9, max_tokens=12, n=1, priority=0, **changes):
    prompt = (np.arange(num_prompt_tokens) + key).astype(np.int32)
    return Request(
        *(SourceId(0), SeqKey(key), f"r{key}", prompt, n, max_tokens, b""),
        priority=priority,
        **changes,
    )


def draw(row: SimulatedRow) -> Draw:
    """Stop sequences whose first token is a multiple of 3 after 5 tokens."""
    stops = int(row.new.token_ids[0]) % 3 == 0 and row.num_outputs == 4
    return Draw(7 + row.num_outputs, stops)


class Clock:
    """A recorder's clock, which a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


class Engine:
    """Plays a session and its worker, with its own clock."""

    def __init__(self, core, calls, clock, lead_s):
        """`lead_s`: the most time by which the next step is sent before a step ends."""
        self.core = core
        self.clock = clock
        self.lead_s = lead_s
        self.calls = [(when, number, call) for number, (when, call) in enumerate(calls)]
        heapq.heapify(self.calls)
        self.worker = SimulatedWorker(draw)
        self.in_flight: deque[tuple[float, Result]] = deque()
        self.free_at = 0.0

    def run(self):
        while self.calls or self.in_flight:
            times = [queue[0][0] for queue in (self.calls, self.in_flight) if queue]
            if len(self.in_flight) == 1 and self.due_at > self.clock.now:
                times.append(self.due_at)
            now = self.clock.now = min(times)
            while self.calls and self.calls[0][0] <= now:
                heapq.heappop(self.calls)[2](self.core, now)
            while self.in_flight and self.in_flight[0][0] <= now:
                self.core.update(self.in_flight.popleft()[1])
            while not self.in_flight or now >= self.due_at:
                if (plan := self.core.schedule(now)) is None:
                    break
                outcome = self.worker.execute(plan)
                step_s = STEP_S + TOKEN_S * plan.num_scheduled_tokens
                self.free_at = max(now, self.free_at) + step_s
                self.in_flight.append((self.free_at, outcome))
            self.core.take_expired()

    @property
    def due_at(self):
        return self.in_flight[0][0] - self.lead_s


def submit(request):
    return lambda core, now: core.submit(request, now)


def cancel(key):
    return lambda core, _: core.cancel(SourceId(0), [key])


def record(folder, calls, config=CONFIG, lead_s=math.inf):
    clock = Clock()
    with (
        Recordings(folder, 1 << 30, epoch=1) as recordings,
        recordings.open_core(INFO, config, clock) as core,
    ):
        Engine(core, calls, clock, lead_s).run()
    (path,) = folder.iterdir()
    return io.BytesIO(path.read_bytes())


CROWD = [
    (100.0 + key * 0.004, submit(make_request(key, priority=int(key == 19), n=1 + key % 2)))
    for key in range(0, 40, 2)
] + [(100.09, submit(make_request(101, priority=1)))]


def test_steps_take_what_they_took_however_late_the_next_one_was_planned(tmp_path):
    result = study(record(tmp_path, CROWD, lead_s=STEP_S / 3), "priority", ())
    assert result.step_times.step_s == pytest.approx(STEP_S, rel=1e-6)
    assert result.step_times.token_s == pytest.approx(TOKEN_S, rel=1e-6)


def test_recorded_policy_simulated_is_what_was_recorded(tmp_path):
    result = study(record(tmp_path, CROWD), "priority", ())
    assert result.step_times.step_s == pytest.approx(STEP_S, rel=1e-6)
    assert result.step_times.token_s == pytest.approx(TOKEN_S, rel=1e-6)
    recorded, control = result.recorded, result.control
    assert recorded.num_steps == control.num_steps
    assert recorded.sequences.keys() == control.sequences.keys()
    for name, was in recorded.sequences.items():
        now = control.sequences[name]
        assert now.token_ids == was.token_ids
        assert now.reason is was.reason
        assert now.queue_s == pytest.approx(was.queue_s)
        assert now.first_token_s == pytest.approx(was.first_token_s)
        assert now.finished_s == pytest.approx(was.finished_s)


def test_other_policy_serves_the_urgent_first_and_says_the_same(tmp_path):
    result = study(record(tmp_path, CROWD), "priority", ())
    urgent = SeqName(0, 101)
    assert result.control.sequences[urgent].queue_s > 0.1
    assert result.other.sequences[urgent].queue_s < 0.1
    for name, was in result.recorded.sequences.items():
        assert result.other.sequences[name].token_ids == was.token_ids
    report = "\n".join(describe_study(result))
    assert "r101 output 0: place" in report
    assert "10.00 ms + 1000.00 us" in report


def test_cancelled_sequences_are_cancelled_with_as_many_tokens(tmp_path):
    calls = [(100.0, submit(make_request(key, max_tokens=40))) for key in range(1, 9)]
    calls += [(100.3, cancel(1)), (100.3, cancel(8))]  # one that runs, one that waits
    result = study(record(tmp_path, calls), "fcfs", ())
    for run in (result.recorded, result.control, result.other):
        runs, waits = run.sequences[SeqName(0, 1)], run.sequences[SeqName(0, 8)]
        assert runs.reason is waits.reason is FinishReason.CANCELLED
        assert len(runs.token_ids) == len(result.recorded.sequences[SeqName(0, 1)].token_ids) > 0
        assert not waits.token_ids


def test_preemptions_by_swap_and_by_recompute(tmp_path):
    for mode in (PreemptionMode.SWAP, PreemptionMode.RECOMPUTE):
        config = SchedulerConfig(
            num_blocks=12,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_model_len=48,
            num_host_blocks=40,
            preemption_mode=mode,
        )
        folder = tmp_path / mode
        calls = [(100.0, submit(make_request(key, max_tokens=30))) for key in (1, 2, 4, 5)]
        result = study(record(folder, calls, config), "fcfs", ())
        assert result.control.num_preemptions == result.recorded.num_preemptions > 0
        assert (result.control.num_recomputed_tokens > 0) == (mode is PreemptionMode.RECOMPUTE)


def test_recording_that_is_too_short_is_refused(tmp_path):
    file = record(tmp_path, [(100.0, submit(make_request(1, max_tokens=1)))])
    with pytest.raises(RecordingError, match="too short"):
        study(file, "fcfs", ())


def test_recording_with_moved_requests_is_refused(tmp_path):
    config = SchedulerConfig(40, 4, 4, 32, 128, num_host_blocks=40)
    calls = [
        (100.0, submit(make_request(1, max_tokens=40))),
        (100.3, lambda core, _: core.begin_export(SourceId(0), SeqKey(1))),
    ]
    with pytest.raises(RecordingError, match="moved between workers"):
        study(record(tmp_path, calls, config), "fcfs", ())
