"""Measures the cost of traces: two services take turns, and one exports its spans.

    python bench/tracing.py --model DIR --rounds 6

The benchmark compares the processor time of the three processes for the same requests, including
the export; other work on the machine disturbs processor time less than wall time. To show the
noise, the service without traces is also compared with itself, between the two halves of the
rounds. The collector is in this process and drops all spans.
"""

import argparse
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from harness.case import Results, arguments, main
from harness.closed_loop import Workload, find_model, run_load
from harness.processes import HOST, Service, model_directory, service
from harness.turns import Spread, turns
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

_WORKER = ("--device", "cpu", "--num-threads", "1", "--kv-cache-memory-gb", "0.25")


class _Sink(trace_service_pb2_grpc.TraceServiceServicer):
    num_spans = 0

    def Export(  # noqa: N802 - the proto's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, _: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        scopes = (scope for each in request.resource_spans for scope in each.scope_spans)
        self.num_spans += sum(len(scope.spans) for scope in scopes)
        return trace_service_pb2.ExportTraceServiceResponse()


async def _round(each: Service, given: argparse.Namespace, seed: int) -> float:
    model = await find_model(each.base_url)
    workload = Workload(model, given.concurrency * 2, 32, given.output_len, seed=seed)
    before = each.cpu_s()
    await run_load(each.base_url, workload, given.concurrency)
    return each.cpu_s() - before


async def measure(given: argparse.Namespace) -> Results:
    num_rounds = 2 if given.quick else given.rounds
    sink = _Sink()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)
    endpoint = f"http://{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
    server.start()
    traced = ("--otlp-traces-endpoint", endpoint, "--trace-sample-ratio", str(given.ratio))
    took: dict[str, list[float]] = {"off": [], "on": []}
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(model_directory(given.model))
        services = {}
        for side, flags in (("off", _WORKER), ("on", (*_WORKER, *traced))):
            services[side] = await stack.enter_async_context(service(model, flags))
            await services[side].wait_until_ready()
        for index, side in turns(services, num_rounds, warm_ups=1):
            cpu_s = await _round(services[side], given, index)
            if index >= 0:
                took[side].append(cpu_s)
    server.stop(None)
    cost = Spread.of_ratios(took["on"], took["off"])
    odd = took["off"][1::2]
    noise = Spread.of_ratios(odd, took["off"][::2][: len(odd)])
    print(f"processor time with traces ÷ without (ratio {given.ratio}), {sink.num_spans} spans:")
    print(f"  with ÷ without              {cost}")
    print(f"  without ÷ itself, the noise {noise}")
    return {"num_spans": sink.num_spans, **cost.metrics("cpu_ratio"), **noise.metrics("cpu_noise")}


if __name__ == "__main__":
    parser = arguments(__doc__, quick="two rounds")
    add = parser.add_argument
    add("--ratio", type=float, default=0.01, help="share of requests to trace")
    add("--rounds", type=int, default=10)
    add("--concurrency", type=int, default=16)
    add("--output-len", type=int, default=64)
    add("--model", type=Path, metavar="DIR", help="default: a random 125M Llama")
    main(parser.parse_args(), measure)
