"""What a call says of its order in its metadata, or its HTTP headers: how urgent, and for whom."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from contract.errors import InvalidArgumentError
from contract.request import GenerateRequest

PRIORITY_KEY: Final = "x-quire-priority"
TENANT_KEY: Final = "x-quire-tenant"

_MAX_DIGITS = 10


def with_precedence(request: GenerateRequest, metadata: Mapping[str, str]) -> GenerateRequest:
    """The request with the priority and the tenant that `metadata` gives, if it does.

    Raises `InvalidArgumentError` for a priority that is no integer; its range is checked with all
    else.
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
