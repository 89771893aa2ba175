"""Limits how many calls of one kind run at once."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from contract.errors import TooBusyError

_RETRY_AFTER_S: Final = 5.0


class Places:
    """Counts and limits the running calls of one kind, per tenant and in all."""

    def __init__(self, kind: str, *, per_tenant: int, in_all: int) -> None:
        """`kind` describes the calls in errors."""
        self._kind = kind
        self._per_tenant = per_tenant
        self._in_all = in_all
        self._tenant_to_num: Counter[str] = Counter()

    @contextmanager
    def take(self, tenant: str) -> Iterator[None]:
        """Count a call while the `with` block runs; raises TooBusyError beyond a limit."""
        num, most, whose = self._tenant_to_num[tenant], self._per_tenant, "of this tenant "
        if num < most:
            num, most, whose = self._tenant_to_num.total(), self._in_all, ""
        if num >= most:
            raise TooBusyError(
                f"{num} {self._kind} {whose}are in progress; the limit is {most}", _RETRY_AFTER_S
            )
        self._tenant_to_num[tenant] += 1
        try:
            yield
        finally:
            self._tenant_to_num[tenant] -= 1
            if not self._tenant_to_num[tenant]:
                del self._tenant_to_num[tenant]
