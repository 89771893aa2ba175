"""What a caller's API key means for a request: whose it is, and with whom it shares KV."""

import hashlib
from dataclasses import replace

from contract.errors import PermissionDeniedError
from contract.request import GenerateRequest
from router.access.api_keys import current_caller


def claim(request: GenerateRequest) -> GenerateRequest:
    """Return the request as its caller's tenant's.

    Its cache salt is made of the tenant's name and the salt that it has: nobody can make another
    tenant's, so nobody finds, or can tell by time, what another tenant has in the prefix cache.

    Raises:
        UnauthenticatedError: There is no caller.
        PermissionDeniedError: It says that it is another tenant's.
    """
    tenant = tenant_of_caller(request.tenant)
    return replace(request, tenant=tenant, cache_salt=_salt(tenant, request.cache_salt))


def tenant_of_caller(claimed: str) -> str:
    """Return the tenant of the call's API key; `claimed` is what the call says, or empty.

    Raises:
        UnauthenticatedError: There is no caller.
        PermissionDeniedError: It says that it is another's.
    """
    tenant = current_caller().tenant
    if claimed not in ("", tenant):
        raise PermissionDeniedError(f"tenant is {claimed!r}; the API key is that of {tenant!r}")
    return tenant


def check_operator() -> None:
    """Check that the call may be told of all tenants.

    Raises:
        UnauthenticatedError: There is no caller.
        PermissionDeniedError: It is a tenant's.
    """
    caller = current_caller()
    if not caller.is_operator:
        raise PermissionDeniedError(
            f"the API key is that of tenant {caller.tenant!r}; this call is for operators"
        )


def _salt(tenant: str, salt: str) -> str:
    """Make one text of two, so that different pairs give different texts."""
    # A tenant has no zero byte in its name, so the first one ends it.
    return hashlib.sha256(f"{tenant}\0{salt}".encode()).hexdigest()
