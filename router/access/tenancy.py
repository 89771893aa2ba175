"""The tenant and priority of a request, from the caller's API key, metadata or HTTP headers."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from contract.errors import InvalidArgumentError, PermissionDeniedError
from contract.request import MAX_TENANT_CHARS, GenerateRequest
from contract.value_checks import check_chars
from router.access.api_keys import current_caller


def claim(request: GenerateRequest) -> GenerateRequest:
    """Return the request with the tenant of its caller's API key.

    The cache salt is hashed with the tenant's name. So a tenant can neither hit another tenant's
    cached prefixes nor detect them by timing, even if both tenants use the same salt.

    Raises:
        UnauthenticatedError: The call has no API key.
        PermissionDeniedError: The request claims another tenant.
    """
    tenant = tenant_of_caller(request.tenant)
    return replace(request, tenant=tenant, cache_salt=_salt(tenant, request.cache_salt))


def tenant_of_caller(claimed: str) -> str:
    """Return the tenant of the call's API key; `claimed` is the tenant that the call names, if any.

    Raises:
        UnauthenticatedError: The call has no API key.
        PermissionDeniedError: The call claims another tenant.
    """
    tenant = current_caller().tenant
    if claimed not in ("", tenant):
        raise PermissionDeniedError(f"tenant is {claimed!r}; the API key belongs to {tenant!r}")
    return tenant


def check_tenant(tenant: str) -> None:
    """Raise InvalidArgumentError if `tenant` is neither empty nor a valid name."""
    check_chars("tenant", tenant, MAX_TENANT_CHARS)
    if not (tenant.isascii() and tenant.isprintable()):
        raise InvalidArgumentError(
            "tenant", f"is {tenant!r}; it must have printable ASCII characters only"
        )


def check_operator() -> None:
    """Check that the caller is an operator.

    Raises:
        UnauthenticatedError: The call has no API key.
        PermissionDeniedError: The key is not an operator's.
    """
    caller = current_caller()
    if not caller.is_operator:
        raise PermissionDeniedError(
            f"the API key belongs to tenant {caller.tenant!r}; this call is for operators"
        )


def _salt(tenant: str, salt: str) -> str:
    """Return a hash that differs between any two pairs of tenant and salt."""
    # A tenant's name has no zero byte, so the first zero byte ends the name.
    return hashlib.sha256(f"{tenant}\0{salt}".encode()).hexdigest()


PRIORITY_KEY: Final = "x-quire-priority"
TENANT_KEY: Final = "x-quire-tenant"

_MAX_DIGITS = 10


def with_precedence(request: GenerateRequest, metadata: Mapping[str, str]) -> GenerateRequest:
    """Return the request with the priority and tenant of `metadata`, if `metadata` has them.

    Raises `InvalidArgumentError` for a priority that is not an integer. Whether the priority is in
    the allowed range is checked later (`check_request` in `router/request/validation.py`).
    """
    priority, tenant = metadata.get(PRIORITY_KEY), metadata.get(TENANT_KEY)
    if priority is None and tenant is None:
        return request
    return replace(
        request,
        priority=request.priority if priority is None else _parse_priority(priority),
        tenant=request.tenant if tenant is None else tenant,
    )


def _parse_priority(text: str) -> int:
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_DIGITS):
        raise InvalidArgumentError(PRIORITY_KEY, f"is {text[:64]!r}; it must be an integer")
    return int(text)
