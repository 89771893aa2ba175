"""`quire load`: has a worker, or all, load the model again, or another one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import grpc

from quire.cli.display import make_display
from quire.cli.probe import Readiness
from quire.cli.settings import LoadSettings
from quire.cli.target import connection_errors, find_scheduler
from quire.v1 import loading_pb2
from quire.v1.loading_pb2_grpc import LoadingServiceStub
from rpc.channel import open_blocking_channel
from rpc.settings import parse_settings
from rpc.status import status_to_error


def main(argv: Sequence[str]) -> int:
    """Run `quire load`; give the exit code."""
    settings = parse_settings(LoadSettings, "quire load", argv)
    target = settings.scheduler or find_scheduler()
    display = make_display()
    ends: list[str] = []
    try:
        with connection_errors(target):
            for told in _load(target, settings):
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


def _load(target: str, settings: LoadSettings) -> Iterator[loading_pb2.LoadResponse]:
    # Relative to where the user is, not to where a worker happens to run.
    model = settings.model
    directory = "" if model is None else str(Path(model).expanduser().absolute())
    request = loading_pb2.LoadRequest(worker=settings.worker, directory=directory)
    with open_blocking_channel(target, tls=settings.client_tls) as channel:
        stub = LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            yield from stub.Load(request)
        except grpc.RpcError as error:
            raise status_to_error(cast("grpc.aio.AioRpcError", error)) from None
