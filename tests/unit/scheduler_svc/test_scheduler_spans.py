"""The scheduler's spans of traced sequences."""

from dataclasses import replace

import numpy as np
import pytest

import rpc.observe.telemetry
from contract.step import Result
from rpc.observe.telemetry import inject
from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.interface.events import Admitted, Finished
from scheduler_svc.core.interface.request import FinishReason, Request
from scheduler_svc.core.reports.load import Queues
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observers.spans import SequenceSpans, WorkerSpans
from scheduler_svc.observers.steps import AnsweredStep, SentStep

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"
NONE = np.empty(0, np.int32)


def make_request(source=1, key=0, num_prompt=2, **changes):
    prompt = np.arange(num_prompt, dtype=np.int32) + 10 * (key % 9)
    return Request(source, key, f"r{key}", prompt, 1, 9, b"", **changes)


@pytest.fixture
def recorded(monkeypatch):
    spans = []

    def record(name, parent, start_s, end_s, attributes):
        assert start_s <= end_s
        spans.append((name, parent, end_s - start_s, attributes))

    monkeypatch.setattr(rpc.observe.telemetry, "record_span", record)
    return spans


def names(recorded):
    return [name for name, *_ in recorded]


def test_queue_span_covers_the_wait(recorded):
    spans = SequenceSpans()
    spans.on_submitted(make_request(key=2**63, traceparent=PARENT))
    spans.on_admitted(Admitted(1, 2**63, num_cached_tokens=32, queue_s=1.5))
    ((name, parent, took_s, attributes),) = recorded
    assert name == "queue"
    assert took_s == pytest.approx(1.5)
    assert inject(parent) == PARENT
    assert attributes["quire.num_cached_tokens"] == 32
    assert attributes["gen_ai.request.id"] == f"r{2**63}"


def test_untraced_finished_and_dropped_sequences_have_none(recorded):
    spans = SequenceSpans()
    spans.on_submitted(make_request(key=0))
    spans.on_submitted(make_request(key=2, traceparent=UNSAMPLED))
    spans.on_submitted(make_request(source=2, key=1, traceparent=PARENT))
    spans.drop_source(2)
    for source, key in ((1, 0), (1, 2), (2, 1)):
        spans.on_admitted(Admitted(source, key, num_cached_tokens=0, queue_s=0))
        spans.on_finished(Finished(source, key, FinishReason.STOP))
    assert recorded == []


def test_finish_is_written_once_with_its_reason(recorded):
    spans = SequenceSpans()
    spans.on_submitted(make_request(traceparent=PARENT))
    for _ in range(2):
        spans.on_finished(Finished(1, 0, FinishReason.DEADLINE), took_s=0.25)
    ((name, _, took_s, attributes),) = recorded
    assert name == "finish"
    assert took_s == pytest.approx(0.25)
    assert attributes["gen_ai.response.finish_reasons"] == ("deadline",)


class Worker:
    """Answers a core's plans with token 7 for each row, and passes them to `WorkerSpans`."""

    def __init__(self, spans, **changes):
        config = SchedulerConfig(
            num_blocks=5,
            block_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            max_model_len=20,
            num_host_blocks=8,
            bytes_per_block=100,
            watermark=0,
            preemption_mode=PreemptionMode.SWAP,
        )
        self.core = Scheduler(replace(config, **changes))
        self.spans = WorkerSpans(spans, "w", 100, self.core.owner)
        self.sequences = spans

    def submit(self, request):
        self.core.submit(request, 0.0)
        self.sequences.on_submitted(request)

    def step(self):
        plan = self.core.schedule(0.0)
        self.spans.on_sent(SentStep(plan, 1000 + plan.step_id, Queues(0, 0, 0), took_s=0.0))
        done = [row for row in range(2) if self.core.owner(row) is not None]
        outcome = Result(
            plan.step_id, np.array(done, np.int32), np.full(len(done), 7, np.int32), NONE, NONE
        )
        news = self.core.update(outcome)
        self.spans.on_answered(AnsweredStep(1000 + plan.step_id, 0.0, 0.0, 0.0, 0.0))
        for finished in news.finished:
            self.sequences.on_finished(finished)
        return plan


def test_swapped_sequence_has_its_way_out_and_back(recorded):
    worker = Worker(SequenceSpans())
    worker.submit(make_request(key=0, num_prompt=6))
    worker.submit(make_request(key=1, num_prompt=2, traceparent=PARENT))
    while "finish" not in names(recorded):
        worker.step()
    told = names(recorded)
    assert told[0] == "admission"
    assert told.count("admission") == 2
    assert [name for name in told if name != "admission"] == [
        "kv_transfer",
        "preempted",
        "kv_transfer",
        "finish",
    ]
    (out, back) = (attributes for name, _, _, attributes in recorded if name == "kv_transfer")
    assert (out["quire.direction"], back["quire.direction"]) == ("out", "in")
    assert out["quire.bytes"] == 100 * out["quire.num_blocks"] > 0
    (preempted,) = (attributes for name, _, _, attributes in recorded if name == "preempted")
    assert preempted["quire.mode"] == "swap"
    assert preempted["quire.step_id"] > 1000, "as on the wire"


def test_recomputed_sequence_moves_nothing(recorded):
    worker = Worker(
        SequenceSpans(), preemption_mode=PreemptionMode.RECOMPUTE, enable_prefix_caching=False
    )
    worker.submit(make_request(key=0, num_prompt=6))
    worker.submit(make_request(key=1, num_prompt=2, traceparent=PARENT))
    while "finish" not in names(recorded):
        worker.step()
    assert names(recorded) == ["admission", "preempted", "admission", "finish"]
    assert recorded[1][3]["quire.mode"] == "recompute"


def test_sequence_that_ends_while_preempted_ends_that_span(recorded):
    spans = SequenceSpans()
    worker = Worker(spans)
    worker.submit(make_request(key=0, num_prompt=6))
    worker.submit(make_request(key=1, num_prompt=2, traceparent=PARENT))
    while "kv_transfer" not in names(recorded):
        worker.step()
    (finished,) = worker.core.cancel(1, [1])
    spans.on_finished(finished)
    assert names(recorded)[-2:] == ["preempted", "finish"]


def test_plans_tell_nothing_of_untraced_sequences():
    worker = Worker(SequenceSpans())
    worker.submit(make_request(key=0, num_prompt=6))
    worker.submit(make_request(key=1, num_prompt=2))
    plans = []
    while worker.core.load().num_running or not plans:
        plans.append(worker.step())
    assert worker.core.load().num_preemptions
    assert not any(plan.trace_events for plan in plans)
