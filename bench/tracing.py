"""Measures what traces cost: two services take turns, of which one exports its spans.

Where others use the machine, too, times say little: so what is compared is the CPU time that the
three processes take for the same requests, export included. The order of a pair changes each time;
the spread of the ratios of one service to itself, in two halves, is the noise. The collector is in
this process and throws all away.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import uvloop
from load import Workload, find_model, run_load
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from processes import Service, make_model, service

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WORKER = ("--device", "cpu", "--num-threads", "1", "--kv-cache-memory-gb", "0.25")


class _Sink(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts spans."""

    def __init__(self) -> None:
        self.num_spans = 0

    def Export(  # noqa: N802 - the proto's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, _: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Take spans."""
        scopes = (scope for each in request.resource_spans for scope in each.scope_spans)
        self.num_spans += sum(len(scope.spans) for scope in scopes)
        return trace_service_pb2.ExportTraceServiceResponse()


def _cpu_s(root: int) -> float:
    """CPU time of a process and all below it, in seconds."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    members = {root}
    while more := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= more
    return sum(ticks.get(pid, 0) for pid in members) / _TICKS_PER_S


async def _round(each: Service, args: argparse.Namespace, seed: int) -> float:
    model = await find_model(each.base_url)
    workload = Workload(model, args.concurrency * 2, 32, args.output_len, seed=seed)
    before = _cpu_s(each.pid)
    await run_load(each.base_url, workload, args.concurrency)
    return _cpu_s(each.pid) - before


async def _measure(args: argparse.Namespace) -> None:
    sink = _Sink()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    traced = ("--otlp-traces-endpoint", endpoint, "--trace-sample-ratio", str(args.ratio))
    async with contextlib.AsyncExitStack() as stack:
        model = args.model
        if model is None:
            model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
            await make_model(model)
        off = await stack.enter_async_context(service(model, _WORKER))
        on = await stack.enter_async_context(service(model, (*_WORKER, *traced)))
        for each in (off, on):
            await each.wait_until_ready()
            await _round(each, args, -1)
        took: dict[Service, list[float]] = {off: [], on: []}
        for turn in range(args.rounds):
            for each in (off, on) if turn % 2 else (on, off):
                took[each].append(await _round(each, args, turn))
    server.stop(None)
    ratios = [b / a for a, b in zip(took[off], took[on], strict=True)]
    noise = [b / a for a, b in zip(took[off][::2], took[off][1::2], strict=False)]
    print(f"CPU time with traces (ratio {args.ratio}) to without, {sink.num_spans} spans:")
    print(f"  all rounds     {sum(took[on]) / sum(took[off]):.4f}")
    print(f"  median, range  {statistics.median(ratios):.4f}, {min(ratios):.4f}-{max(ratios):.4f}")
    print(f"  without to itself, range  {min(noise):.4f}-{max(noise):.4f}")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratio", type=float, default=0.01, help="share of requests to trace")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--model", type=Path, default=None, help="default: 125M, random weights")
    uvloop.run(_measure(parser.parse_args()))


if __name__ == "__main__":
    main()
