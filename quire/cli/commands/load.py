"""`quire load`: loads the model of an unloaded worker, or of all, or another model."""

from collections.abc import Sequence
from pathlib import Path

from quire.cli.commands.probe import Readiness
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
            for told in stub.Load(_request(settings)):
                progress = told.progress if told.HasField("progress") else None
                status = "ready" if told.is_done else told.status
                display.show({told.worker: Readiness(told.is_done, status, progress)})
                if told.is_done:
                    how = "was loaded already" if told.was_loaded else "is loaded"
                    ends.append(f"{told.worker} {how}")
    finally:
        display.close()
    print("\n".join(ends))
    return 0


def _request(settings: LoadSettings) -> loading_pb2.LoadRequest:
    # Relative to the user's directory, not to a worker's.
    model = settings.model
    directory = "" if model is None else str(Path(model).expanduser().absolute())
    return loading_pb2.LoadRequest(worker=settings.worker, directory=directory)
