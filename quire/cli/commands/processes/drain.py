"""`quire drain`: drains and ends one process."""

from collections.abc import Sequence
from typing import cast

import grpc

from quire.cli.settings import DrainSettings
from quire.cli.target import connection_errors
from quire.v1 import admin_pb2
from quire.v1.admin_pb2_grpc import AdminServiceStub
from rpc.peers.channel import open_blocking_channel
from rpc.settings import parse_settings
from rpc.status import status_to_error


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(DrainSettings, "quire drain", argv)
    with connection_errors(settings.target):
        _drain(settings)
    print(f"{settings.worker or settings.target} has drained and ends")
    return 0


def _drain(settings: DrainSettings) -> None:
    key = settings.api_key.get_secret_value()
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    request = admin_pb2.DrainRequest(worker=settings.worker)
    name = settings.worker or settings.target
    has_begun = False
    with open_blocking_channel(settings.target, tls=settings.client_tls) as channel:
        stub = AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            for progress in stub.Drain(request, metadata=metadata):
                has_begun = True
                print(f"{name} drains: {progress.num_live} live", flush=True)
        except grpc.RpcError as error:
            if not has_begun:  # otherwise the process has ended after its drain
                raise status_to_error(cast("grpc.aio.AioRpcError", error)) from None
