"""Measures, in a separate process, how soon an overloaded router refuses a request.

    python -m faults.probe TARGET --seconds S --prompt-len N --output-len N

`overload.py` starts this process, because a client that reads hundreds of streams would measure its
own delays. Each caller makes one call at a time. A caller first asks for the router's health, which
the router answers from memory: this takes only the delay of the machine, gRPC and the event loop.
Then the caller asks for tokens, and cancels when it gets one. Prints JSON, in seconds: how long
health calls and refusals took, and by how much sleeps were too long, which is the delay that the
machine adds.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import common_pb2, inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from rpc.peers.channel import open_blocking_channel

_NUM_CALLERS = 8
"""More than one, because an accepted caller waits for its token."""
_PAUSE_S = 0.05
_CALL_S = 30.0


def call_in_turn(
    channel: grpc.Channel, given: argparse.Namespace, seed: int, took: dict[str, list[float]]
) -> None:
    """Ask for health and for tokens, one after the other, until the time is over."""
    draw = random.Random(seed)
    health = health_pb2_grpc.HealthStub(channel)
    stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
    check = health_pb2.HealthCheckRequest()
    end_s = time.monotonic() + given.seconds
    while time.monotonic() < end_s:
        took["late_s"].append(_seconds(lambda: time.sleep(_PAUSE_S)) - _PAUSE_S)
        took["health_s"].append(_seconds(lambda: health.Check(check, timeout=_CALL_S)))
        prompt = [draw.randrange(2, 4000) for _ in range(given.prompt_len)]
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(max_tokens=given.output_len, ignore_eos=True),
        )
        started_s = time.monotonic()
        call = stub.Generate(request, timeout=_CALL_S)
        try:
            next(call)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            took["refusal_s"].append(time.monotonic() - started_s)
        finally:
            call.cancel()


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.monotonic()
    work()
    return time.monotonic() - started_s


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--prompt-len", type=int, required=True)
    parser.add_argument("--output-len", type=int, required=True)
    given = parser.parse_args()
    took: dict[str, list[float]] = defaultdict(list)  # threads may append
    with open_blocking_channel(given.target) as channel, ThreadPoolExecutor(_NUM_CALLERS) as pool:
        calls = [pool.submit(call_in_turn, channel, given, i, took) for i in range(_NUM_CALLERS)]
    for call in calls:
        call.result()
    print(json.dumps(took))
