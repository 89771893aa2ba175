"""A few callers beside the crowd: how soon a router refuses, told by a process that does no more.

`overload.py` starts it, since a client that has hundreds of streams to read measures itself. Each
caller has one call at a time: it asks the router's health, which is answered from memory and so is
what the machine, gRPC and the router's event loop take by themselves; then for tokens, and goes
when it gets one. It prints as JSON how long the health calls and the refusals took, in seconds, and
by how much its sleeps were too long: what the machine makes anybody wait.

    python bench/overload_probe.py TARGET --seconds S --prompt-len N --output-len N
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import common_pb2, inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from rpc.peers.channel import open_blocking_channel

_NUM_CALLERS = 8
"""Who is accepted waits for a token; the others go on."""
_PAUSE_S = 0.05
_CALL_S = 30.0


@dataclass(slots=True)
class Took:
    """How long calls took; threads may append."""

    health_s: list[float] = field(default_factory=list)
    refusal_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)


def call_around(channel: grpc.Channel, args: argparse.Namespace, seed: int, took: Took) -> None:
    """Ask for health and for tokens in turn, until the time is over."""
    draw = random.Random(seed)
    health = health_pb2_grpc.HealthStub(channel)
    stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
    check = health_pb2.HealthCheckRequest()
    end_s = time.monotonic() + args.seconds
    while time.monotonic() < end_s:
        took.late_s.append(time_of(lambda: time.sleep(_PAUSE_S)) - _PAUSE_S)
        took.health_s.append(time_of(lambda: health.Check(check, timeout=_CALL_S)))
        prompt = [draw.randrange(2, 4000) for _ in range(args.prompt_len)]
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(max_tokens=args.output_len, ignore_eos=True),
        )
        started_s = time.monotonic()
        call = stub.Generate(request, timeout=_CALL_S)
        try:
            next(call)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            took.refusal_s.append(time.monotonic() - started_s)
        finally:
            call.cancel()


def time_of(work: Callable[[], object]) -> float:
    """Say how long it takes, in seconds."""
    started_s = time.monotonic()
    work()
    return time.monotonic() - started_s


def main() -> None:
    """Probe, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--prompt-len", type=int, required=True)
    parser.add_argument("--output-len", type=int, required=True)
    args = parser.parse_args()
    took = Took()
    with open_blocking_channel(args.target) as channel, ThreadPoolExecutor(_NUM_CALLERS) as threads:
        calls = [threads.submit(call_around, channel, args, i, took) for i in range(_NUM_CALLERS)]
    for call in calls:
        call.result()
    print(json.dumps(asdict(took)))


if __name__ == "__main__":
    main()
