"""The parts of admission that all models of a router share: live requests, quotas, usage, audit."""

import asyncio

from router.access.api_keys import ApiKeys, current_caller, enter_as
from router.access.quotas import Quotas
from router.access.tenancy import check_operator, check_tenant, tenant_of_caller
from router.live.usage import UsageCounts
from router.request.admission import Admission
from router.request.audit import AuditLog

_MAX_ESCAPE_BYTES = 6
"""JSON needs at most this many bytes for one byte of text, as in \\u0041."""


class SharedAdmission:
    """Admits the requests of one router; must be created within the event loop."""

    def __init__(
        self,
        max_live_requests: int,
        api_keys: ApiKeys | None = None,
        usage: UsageCounts | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """If `api_keys` is not None, the key of a call determines its tenant.

        `usage` counts the usage of requests; `audit` logs their prompts and outputs.
        """
        self.usage = usage
        self.audit = audit
        self.max_live_requests = max_live_requests
        self.admission = Admission(max_live_requests)
        tenant_to_quota = {} if api_keys is None else api_keys.tenant_to_quota
        self.quotas = Quotas(tenant_to_quota, asyncio.get_running_loop().time())
        self.has_api_keys = api_keys is not None

    def check_quota(self, num_bytes: int, max_token_bytes: int) -> None:
        """Check the quota of the caller's tenant before a body is parsed.

        Raises `TooBusyError` if the quota is used up, or has too few tokens left for a JSON body of
        `num_bytes`. The check assumes that the body has the fewest possible tokens, each with
        `max_token_bytes` of text.
        """
        if self.has_api_keys:
            num_tokens = 1 + num_bytes // (_MAX_ESCAPE_BYTES * max_token_bytes)
            now = asyncio.get_running_loop().time()
            self.quotas.check(current_caller().tenant, num_tokens, now)

    def tenant_of(self, claimed: str) -> str:
        """Return the tenant of a call that names the tenant `claimed`.

        Raises the errors of `tenant_of_caller` or, if calls have no API keys, of `check_tenant`.
        """
        if self.has_api_keys:
            return tenant_of_caller(claimed)
        check_tenant(claimed)
        return claimed

    def act_for(self, tenant: str, key_name: str) -> None:
        """Let the current task make calls for a tenant whose key was checked before."""
        if self.has_api_keys:
            enter_as(tenant, key_name)

    def check_operator(self) -> None:
        """Raise `PermissionDeniedError` if the call's API key is a tenant's, not an operator's."""
        if self.has_api_keys:
            check_operator()
