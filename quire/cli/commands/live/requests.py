"""`quire requests`: lists the live requests of a service's routers."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quire.cli.settings import RequestsSettings, RouterTargetSettings
from quire.cli.target import connection_errors, find_operator_targets
from quire.v1 import requests_pb2
from quire.v1.requests_pb2_grpc import RequestServiceStub
from rpc.peers.channel import open_blocking_channel
from rpc.settings import parse_settings
from rpc.status import calling

_STATE_TO_WORD: Final[dict[int, str]] = {
    number: name.rpartition("_")[2].lower() for name, number in requests_pb2.RequestState.items()
}


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(RequestsSettings, "quire requests", argv)
    asked = filter_of(settings.tenant, settings.older_than_s)
    found: list[requests_pb2.LiveRequest] = []
    for target in find_operator_targets(settings):
        with calling_operator(settings, target) as (stub, metadata):
            request = requests_pb2.ListRequestsRequest(filter=asked)
            found += stub.ListRequests(request, metadata=metadata).requests
    if settings.json_:
        for each in found:
            print(json.dumps(_to_json(each)))
    else:
        Console(highlight=False).print(_table(found))
    return 0


def filter_of(
    tenant: str | None, older_than_s: float | None, request_id: str = ""
) -> requests_pb2.RequestFilter:
    """Make the filter of a `ListRequests` or `CancelRequests` call from the values of flags."""
    return requests_pb2.RequestFilter(request_id=request_id, tenant=tenant, min_age_s=older_than_s)


@contextlib.contextmanager
def calling_operator(
    settings: RouterTargetSettings, target: str
) -> Iterator[tuple[RequestServiceStub, tuple[tuple[str, str], ...]]]:
    """Yield a stub for operators' calls to the router at `target`, and the metadata of these calls.

    The metadata has the API key, if the settings have one.
    """
    key = settings.api_key.get_secret_value()
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    with (
        connection_errors(target),
        open_blocking_channel(target, tls=settings.client_tls) as channel,
        calling(),
    ):
        yield RequestServiceStub(channel), metadata  # type: ignore[no-untyped-call]


def _table(found: Sequence[requests_pb2.LiveRequest]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("request", min_width=max((len(each.request_id) for each in found), default=0))
    table.add_column("tenant")
    for heading in ("age", "prompt", "output"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", min_width=len("preparing"))
    table.add_column("model", overflow="ellipsis", no_wrap=True)
    for each in found:
        table.add_row(
            escape(each.request_id),
            escape(each.tenant),
            f"{each.age_s:.1f} s",
            str(each.num_prompt_tokens),
            str(each.num_output_tokens),
            _STATE_TO_WORD.get(each.state, str(each.state)),
            escape(each.model),
        )
    return table


def _to_json(each: requests_pb2.LiveRequest) -> dict[str, object]:
    values = {field.name: getattr(each, field.name) for field in each.DESCRIPTOR.fields}
    return {**values, "state": _STATE_TO_WORD.get(each.state, str(each.state))}
