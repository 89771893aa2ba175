"""Operators' views of each process of a running service: health, services, metrics, traces."""

import json
import urllib.request

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.e2e.child import Child
from tests.e2e.generation import generate_request, read
from tests.e2e.service import JSON_TYPE, Service
from tests.e2e.trace_collector import TraceCollector

GREEDY = {"max_tokens": 24, "ignore_eos": True}


SERVICES = {
    "router": "quire.v1.InferenceService",
    "scheduler": "quire.v1.SchedulerService",
    "worker": "quire.v1.WorkerService",
}


@pytest.mark.parametrize("process", SERVICES)
def test_grpc_health(traced: Service, process: str):
    with grpc.insecure_channel(f"unix:{traced.uds[process]}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICES[process]):
            response = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("process", SERVICES)
def test_reflection(traced: Service, process: str):
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICES[process]),
    ]
    with grpc.insecure_channel(f"unix:{traced.uds[process]}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, described = stub.ServerReflectionInfo(iter(requests), timeout=10)
    names = {service.name for service in listed.list_services_response.service}
    assert names >= {SERVICES[process], "grpc.health.v1.Health"}
    files = [
        FileDescriptorProto.FromString(file)
        for file in described.file_descriptor_response.file_descriptor_proto
    ]
    described_names = {f"{file.package}.{s.name}" for file in files for s in file.service}
    assert SERVICES[process] in described_names


METRICS = {
    "router": {
        "quire_num_requests_live",
        "quire_request_success_total",
        "quire_prompt_tokens_total",
        "quire_generation_tokens_total",
        "quire_time_to_first_token_seconds_count",
        "quire_inter_token_latency_seconds_count",
        "quire_e2e_request_latency_seconds_count",
    },
    "scheduler": {
        "quire_num_requests_running",
        "quire_num_requests_waiting",
        "quire_kv_cache_usage_perc",
        "quire_prefix_cache_queries_total",
        "quire_prefix_cache_hits_total",
        "quire_num_preemptions_total",
        "quire_request_queue_time_seconds_count",
        "quire_step_rpc_seconds_count",
        "quire_steps_total",
    },
    "worker": {"quire_worker_rows_used", "quire_worker_kv_bytes"},
}


@pytest.mark.parametrize("process", METRICS)
def test_metrics(traced: Service, process: str):
    read(traced.stub.Generate(generate_request("The quick brown fox", **GREEDY)))
    metrics = traced.metrics(_child(traced, process))
    assert metrics.keys() >= METRICS[process]
    for name in METRICS[process]:
        if name.endswith("_count") or "tokens" in name:
            assert metrics[name] > 0, name


@pytest.mark.parametrize("process", SERVICES)
def test_http_health_and_ready(traced: Service, process: str):
    child = _child(traced, process)
    assert traced.get_json(child, "/health")[0] == 200
    status, body = traced.get_json(child, "/ready")
    assert status == 200
    assert "status" in body


def _child(service: Service, process: str) -> Child:
    return {"router": service.router, "scheduler": service.scheduler, "worker": service.worker}[
        process
    ]


TRACE_ID, CALLER_SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("api", ["grpc", "http"])
def test_one_trace_through_all_processes(traced: Service, collector: TraceCollector, api: str):
    trace_id = TRACE_ID[:-1] + ("1" if api == "grpc" else "2")
    traceparent = f"00-{trace_id}-{CALLER_SPAN_ID}-01"
    prompt = list(range(20, 60))
    if api == "grpc":
        request = generate_request(prompt, **GREEDY)
        read(traced.stub.Generate(request, metadata=[("traceparent", traceparent)]))
    else:
        body = {"prompt": prompt, "temperature": 0, **GREEDY}
        urllib.request.urlopen(
            urllib.request.Request(
                f"{traced.url}/v1/completions",
                json.dumps(body).encode(),
                {"traceparent": traceparent} | JSON_TYPE,
            ),
            timeout=30,
        ).close()
    names = ["request", "tokenize", "queue", "admission", "prefill", "prefill_chunk", "decode"]
    spans = collector.wait_for(trace_id, [*names, "finish"])
    assert sorted((span.service, span.name) for span in spans) == [
        ("quire-router", "request"),
        ("quire-router", "tokenize"),
        ("quire-scheduler", "admission"),
        ("quire-scheduler", "finish"),
        ("quire-scheduler", "queue"),
        ("quire-worker", "decode"),
        ("quire-worker", "prefill"),
        ("quire-worker", "prefill_chunk"),
    ]
    by_name = {span.name: span for span in spans}
    request_span = by_name["request"]
    assert request_span.parent_span_id == CALLER_SPAN_ID
    for name in ("tokenize", "queue", "admission", "prefill", "decode", "finish"):
        assert by_name[name].parent_span_id == request_span.span_id
        assert by_name[name].start_ns <= by_name[name].end_ns
    # The queue ends in the scheduler before the prefill begins in the worker.
    assert request_span.start_ns <= by_name["queue"].start_ns
    assert by_name["queue"].end_ns <= by_name["prefill"].start_ns
    assert by_name["prefill"].end_ns <= by_name["decode"].start_ns
    assert request_span.attributes["gen_ai.usage.input_tokens"] == 40
    assert request_span.attributes["gen_ai.usage.output_tokens"] == 24
    assert by_name["decode"].attributes["gen_ai.usage.output_tokens"] == 24
