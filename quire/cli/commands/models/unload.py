"""`quire unload`: frees the device of one worker or of all, until `quire load` loads a model."""

from collections.abc import Sequence

from quire.cli.invocation import invocation
from quire.cli.settings import UnloadSettings
from quire.cli.target import scheduler_channel
from quire.v1 import loading_pb2
from quire.v1.loading_pb2_grpc import LoadingServiceStub
from rpc.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(UnloadSettings, "quire unload", argv)
    with scheduler_channel(settings) as channel:
        stub = LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
        response = stub.Unload(loading_pb2.UnloadRequest(worker=settings.worker))
    for each in response.workers:
        print(f"{each.worker} {'was unloaded already' if each.was_unloaded else 'is unloaded'}")
    which = f" --served-model {settings.served_model}" if settings.served_model else ""
    command = f"`{invocation()} load{which}`"
    print(f"{command} loads it again; until then, requests use other workers or wait")
    return 0
