"""A client process for tests to kill: it reads one delta, reports it, and then waits forever."""

import sys
import threading

import grpc

from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.generation import generate_request


def main(target: str) -> None:
    """Streams and stops reading after the first event."""
    stub = InferenceServiceStub(grpc.insecure_channel(target))
    next(stub.Generate(generate_request([5, 6, 7], max_tokens=4000, ignore_eos=True)))
    sys.stdout.write("streaming\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
