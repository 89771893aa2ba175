"""One trace from the client to the worker's steps, for a request that is swapped."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path

import pytest

from tests.e2e.generation import generate_request, read
from tests.e2e.service import Service
from tests.e2e.trace_collector import Span, TraceCollector

TRACE_ID, CALLER_SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    with TraceCollector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cramped(
    collector: TraceCollector, long_llama: Path, run_dir: Callable[[], Path]
) -> Iterator[Service]:
    """A service with too few blocks for two long outputs, and small steps."""
    endpoint = f"--otlp-traces-endpoint={collector.endpoint}"
    with Service(
        run_dir(),
        long_llama,
        worker=[
            *("--num-blocks=14", "--block-size=16", "--host-kv-memory-gb=0.01"),
            *("--max-num-seqs=4", "--max-num-batched-tokens=17", endpoint),
        ],
        scheduler=[
            *("--preemption-mode=swap", "--max-decode-slowdown=inf", endpoint),
            "--worker-silence-s=60",  # the tests stop the worker
        ],
        router=[endpoint, "--trace-sample-ratio=0"],
        env={"OTEL_BSP_SCHEDULE_DELAY": "100"},
    ) as service:
        yield service


@pytest.fixture(scope="module")
def spans(cramped: Service, collector: TraceCollector) -> list[Span]:
    """The spans of a request that is preempted for an untraced one, and resumes."""
    first = cramped.stub.Generate(generate_request(PROMPT[::-1], max_tokens=180, ignore_eos=True))
    event = next(first)
    traceparent = f"00-{TRACE_ID}-{CALLER_SPAN_ID}-01"
    second = generate_request(PROMPT, max_tokens=100, ignore_eos=True)
    metadata = [("traceparent", traceparent)]
    with ThreadPoolExecutor(1) as pool:
        # the first request must not end alone
        with cramped.holding_steps(cramped.router, 2):
            reading = pool.submit(lambda: read(cramped.stub.Generate(second, metadata=metadata)))
        reading.result()
    read(chain([event], first))
    once = ["request", "tokenize", "queue", "preempted", "finish"]
    twice = ["admission", "prefill", "decode", "kv_transfer"]
    return collector.wait_for(TRACE_ID, [*once, *twice, *twice, *["prefill_chunk"] * 4])


def named(spans: list[Span], name: str) -> list[Span]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_ns)


def test_every_span_comes_from_its_process_and_has_its_parent(spans):
    (request,) = named(spans, "request")
    assert request.parent_span_id == CALLER_SPAN_ID
    owners = {
        "quire-router": {"request", "tokenize"},
        "quire-scheduler": {"queue", "admission", "preempted", "kv_transfer", "finish"},
        "quire-worker": {"prefill", "prefill_chunk", "decode"},
    }
    for span in spans:
        assert span.name in owners[span.service]
    prefills = {span.span_id for span in named(spans, "prefill")}
    for span in spans:
        if span.name == "prefill_chunk":
            assert span.parent_span_id in prefills
        elif span is not request:
            assert span.parent_span_id == request.span_id


def test_spans_follow_each_other(spans):
    (request,), (queue,), (preempted,), (finish,) = (
        named(spans, name) for name in ("request", "queue", "preempted", "finish")
    )
    admissions, prefills, decodes = (
        named(spans, name) for name in ("admission", "prefill", "decode")
    )
    out, back = named(spans, "kv_transfer")
    assert [out.attributes["quire.direction"], back.attributes["quire.direction"]] == ["out", "in"]
    in_order = [
        *(request.start_ns, queue.start_ns, admissions[0].start_ns, prefills[0].start_ns),
        *(decodes[0].start_ns, preempted.start_ns, preempted.end_ns, admissions[1].start_ns),
        *(prefills[1].start_ns, decodes[1].start_ns, finish.start_ns),
    ]
    assert in_order == sorted(in_order)
    assert out.start_ns == preempted.start_ns
    assert preempted.end_ns == back.start_ns <= back.end_ns
    assert back.end_ns <= admissions[1].end_ns


def test_transfers_say_what_they_moved(spans, cramped):
    (preempted,) = named(spans, "preempted")
    num_computed = preempted.attributes["quire.num_computed_tokens"]
    assert preempted.attributes["quire.mode"] == "swap"
    for span in named(spans, "kv_transfer"):
        assert span.attributes["quire.tier"] == "host"
        assert span.attributes["quire.num_blocks"] == -(-num_computed // 16)
        num_bytes = span.attributes["quire.bytes"]
        assert num_bytes % span.attributes["quire.num_blocks"] == 0 < num_bytes
    metrics = cramped.metrics(cramped.worker)
    assert metrics["quire_worker_kv_transfer_bytes_total"] >= 2 * num_bytes


def test_chunks_and_decodes_are_linked_to_steps_and_those_to_the_request(spans, collector):
    (request,) = named(spans, "request")
    chunks, decodes = named(spans, "prefill_chunk"), named(spans, "decode")
    steps = collector.linked_to([*chunks, *decodes])
    for step in steps.values():
        assert (step.service, step.name) == ("quire-worker", "step")
        assert (step.trace_id != TRACE_ID, step.parent_span_id) == (True, "")
        assert step.links == {request.span_id}, "the other is not traced"
    for chunk in chunks:
        (step,) = (steps[span_id] for span_id in chunk.links)
        assert step.attributes["quire.step_id"] == chunk.attributes["quire.step_id"]
    first, _ = named(spans, "prefill")
    parts = [chunk for chunk in chunks if chunk.parent_span_id == first.span_id]
    tokens = [chunk.attributes["quire.num_tokens"] for chunk in parts]
    assert len(tokens) > 1
    assert sum(tokens) == first.attributes["quire.num_tokens"] == len(PROMPT)
    starts = [chunk.attributes["quire.num_computed_tokens"] for chunk in parts]
    assert [b - a for a, b in pairwise(starts)] == tokens[:-1]
    num_decodes = decodes[0].attributes["quire.num_tokens"] - 1
    assert len(decodes[0].links) == num_decodes.bit_length(), "the 1st, 2nd, 4th, 8th ..."


def test_admissions_name_the_steps_that_began_the_prefills(spans):
    steps = {chunk.attributes["quire.step_id"]: chunk for chunk in named(spans, "prefill_chunk")}
    for admission in named(spans, "admission"):
        chunk = steps[admission.attributes["quire.step_id"]]
        computed = chunk.attributes["quire.num_computed_tokens"]
        assert computed == admission.attributes["quire.num_computed_tokens"]


def test_request_says_what_was_asked_and_answered(spans):
    (request,), (finish,) = named(spans, "request"), named(spans, "finish")
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.max_tokens": 100,
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 100,
    }
    assert request.attributes.items() >= expected.items()
    assert request.attributes["gen_ai.latency.time_to_first_token"] > 0
    assert finish.attributes["gen_ai.request.id"] == request.attributes["gen_ai.request.id"]


def test_requests_that_nobody_asked_to_trace_have_no_spans(cramped, collector):
    read(cramped.stub.Generate(generate_request(PROMPT[5:], max_tokens=4, ignore_eos=True)))
    unsampled = f"00-{TRACE_ID[::-1]}-{CALLER_SPAN_ID}-00"
    request = generate_request(PROMPT[6:], max_tokens=4, ignore_eos=True)
    read(cramped.stub.Generate(request, metadata=[("traceparent", unsampled)]))
    # Later exports would have arrived after these spans.
    traceparent = f"00-{TRACE_ID[:-1]}f-{CALLER_SPAN_ID}-01"
    read(cramped.stub.Generate(request, metadata=[("traceparent", traceparent)]))
    collector.wait_for(TRACE_ID[:-1] + "f", ["request", "queue", "decode", "finish"])
    for name in ("request", "decode"):
        assert collector.trace_ids(name) - {TRACE_ID} == {TRACE_ID[:-1] + "f"}
