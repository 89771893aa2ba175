"""`quire cancel`: ends live requests of a service's routers."""

from collections.abc import Sequence

from quire.cli.commands.live.requests import calling_operator, filter_of
from quire.cli.settings import CancelSettings
from quire.cli.target import find_operator_targets
from quire.v1 import requests_pb2
from rpc.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(CancelSettings, "quire cancel", argv)
    older_than_s = 0.0 if settings.all and settings.older_than_s is None else settings.older_than_s
    num_ended = 0
    for target in find_operator_targets(settings):
        with calling_operator(settings, target) as (stub, metadata):
            for request_id in settings.request_ids or ("",):
                asked = filter_of(settings.tenant, older_than_s, request_id)
                request = requests_pb2.CancelRequestsRequest(filter=asked)
                for each in stub.CancelRequests(request, metadata=metadata).requests:
                    num_ended += 1
                    tenant = f" of {each.tenant}" if each.tenant else ""
                    print(f"{each.request_id}{tenant} ended after {each.num_output_tokens} tokens")
    if not num_ended:
        print("no live request matches")
    return 0
