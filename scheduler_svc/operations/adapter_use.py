"""Which LoRA adapters requests have, those included that are about to come again."""

import asyncio
from collections.abc import Iterable

from contract.errors import NotFoundError
from contract.lora import LoraAdapter
from scheduler_svc.core.handover.takeover import REUNION_S
from scheduler_svc.core.reports.load import has_live_with
from scheduler_svc.core.request import Request
from scheduler_svc.operations.adapter_salt import ADAPTERS_SALT, adapter_salt
from scheduler_svc.workers.roster import Roster
from scheduler_svc.workers.unplaced import UnplacedRequests


class AdapterUse:
    """Looks through the requests of one scheduler."""

    def __init__(self, roster: Roster, unplaced: UnplacedRequests) -> None:
        self._roster = roster
        self._unplaced = unplaced
        self._expected_since: float | None = None

    def expect(self) -> None:
        """For a while, requests of which nothing is known here may come again."""
        self._expected_since = asyncio.get_running_loop().time()

    def is_used(self, adapter: LoraAdapter) -> bool:
        """Say whether a request has an adapter, or may have it.

        What nobody has claimed of the scheduler before may have any: what it had is not known
        before its request comes again. Nor is it of the requests that are expected.
        """
        now, since = asyncio.get_running_loop().time(), self._expected_since
        if since is not None and now < since + REUNION_S:
            return True
        salt = adapter_salt(adapter)
        return self._unplaced.has_with(salt) or any(
            session.call(lambda core: bool(core.unclaimed) or has_live_with(core, salt))
            for session in self._roster.sessions.values()
        )


def check_adapter(request: Request, held: Iterable[LoraAdapter]) -> None:
    """Check that a request's adapter, if it has one, is among those that are held.

    Raises:
        NotFoundError: It was lost with all workers.
    """
    if request.cache_salt.startswith(ADAPTERS_SALT) and not any(
        request.cache_salt.startswith(adapter_salt(each)) for each in held
    ):
        raise NotFoundError(f"LoRA adapter of {request.request_id!r} is not served any more")
