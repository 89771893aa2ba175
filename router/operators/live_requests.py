"""Operators' calls that list and cancel the live requests of this router."""

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from contract.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError
from quire.v1 import requests_pb2
from router.request.admission import AdmittedRequest
from router.request.cells import Cells
from rpc.security.operators import Operators

_MESSAGE: Final = "an operator has ended the request"

log = structlog.get_logger()


class LiveRequests:
    """Lists and cancels live requests. Every method first checks that `peer` is an operator."""

    def __init__(self, cells: Cells, operators: Operators) -> None:
        self._cells = cells
        self._operators = operators

    def list(
        self, asked: requests_pb2.RequestFilter, peer: str
    ) -> Sequence[requests_pb2.LiveRequest]:
        """Return the requests that pass the filter, oldest first."""
        self._operators.check(peer, "lists requests")
        return [_to_proto(each) for each in self._find(asked)]

    async def cancel(
        self, asked: requests_pb2.RequestFilter, peer: str
    ) -> Sequence[requests_pb2.LiveRequest]:
        """Cancel the requests that pass the filter; return those that had not ended before.

        Raises `InvalidArgumentError` for an empty filter, and `NotFoundError` if no live request
        has the id in the filter.
        """
        self._operators.check(peer, "cancels requests")
        if not asked.ListFields():
            raise InvalidArgumentError(
                "filter", "is empty; it must have a request_id, a tenant or a min_age_s"
            )
        if not asked.min_age_s >= 0:
            raise InvalidArgumentError(
                "filter.min_age_s", f"is {asked.min_age_s}; it must be at least 0"
            )
        found = self._find(asked)
        ended = [_to_proto(each) for each in found if each.end(PermissionDeniedError(_MESSAGE))]
        # A resumable request that no call reads is known only to a scheduler, and so is its age.
        if asked.request_id and not found and not asked.HasField("min_age_s"):
            try:
                await self._cells.cancel_of(asked.tenant, asked.request_id)
            except NotFoundError:
                raise NotFoundError(
                    f"request {asked.request_id!r} of tenant {asked.tenant!r} is not live here"
                ) from None
            ended = [requests_pb2.LiveRequest(request_id=asked.request_id, tenant=asked.tenant)]
        for each in ended:
            log.info(
                "cancelled by an operator",
                request_id=each.request_id,
                tenant=each.tenant,
                peer=peer,
            )
        return ended

    def _find(self, asked: requests_pb2.RequestFilter) -> Sequence[AdmittedRequest]:
        now = asyncio.get_running_loop().time()
        return [
            each
            for each in self._cells.admitted
            if asked.request_id in ("", each.request_id)
            and (not asked.HasField("tenant") or asked.tenant == each.tenant)
            and (not asked.HasField("min_age_s") or now - each.admitted_at >= asked.min_age_s)
        ]


def _to_proto(admitted: AdmittedRequest) -> requests_pb2.LiveRequest:
    proto = requests_pb2.LiveRequest(
        request_id=admitted.request_id,
        tenant=admitted.tenant,
        age_s=asyncio.get_running_loop().time() - admitted.admitted_at,
        state=requests_pb2.REQUEST_STATE_PREPARING,
    )
    live = admitted.live
    if live is not None:
        proto.state = requests_pb2.REQUEST_STATE_WAITING
        if not live.live_seq_keys:
            proto.state = requests_pb2.REQUEST_STATE_UNREAD
        elif live.num_completion_tokens:
            proto.state = requests_pb2.REQUEST_STATE_RUNNING
        proto.model = live.model
        proto.num_prompt_tokens = len(live.prompt_token_ids)
        proto.num_output_tokens = live.num_completion_tokens
        proto.num_outputs = len(live.outputs)
        proto.priority = live.record.priority
        proto.is_resumable = live.record.resume_record is not None
    return proto
