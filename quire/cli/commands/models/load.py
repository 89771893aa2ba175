"""`quire load`: loads a model at unloaded workers, by default the model that each had before."""

from collections.abc import Sequence
from pathlib import Path

from quire.cli.readiness import Readiness
from quire.cli.settings import LoadSettings
from quire.cli.target import scheduler_channel
from quire.cli.up.progress import make_display
from quire.v1 import loading_pb2
from quire.v1.loading_pb2_grpc import LoadingServiceStub
from rpc.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(LoadSettings, "quire load", argv)
    display = make_display()
    ends: list[str] = []
    try:
        with scheduler_channel(settings) as channel:
            stub = LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
            for answer in stub.Load(_request(settings)):
                progress = answer.progress if answer.HasField("progress") else None
                status = "ready" if answer.is_done else answer.status
                display.show({answer.worker: Readiness(answer.is_done, status, progress)})
                if answer.is_done:
                    how = "was loaded already" if answer.was_loaded else "is loaded"
                    ends.append(f"{answer.worker} {how}")
    finally:
        display.close()
    print("\n".join(ends))
    return 0


def _request(settings: LoadSettings) -> loading_pb2.LoadRequest:
    # A relative path is relative to the user's directory, not to a worker's.
    model = settings.model
    directory = "" if model is None else str(Path(model).expanduser().absolute())
    return loading_pb2.LoadRequest(worker=settings.worker, directory=directory)
