"""API keys: the owner of each key, and the check of a caller's key."""

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from contract.errors import UnauthenticatedError
from router.access.quotas import Quota

_SCHEME: Final = "bearer"
_SHA256_PATTERN: Final = r"^[0-9a-fA-F]{64}$"
_NAME_DIGITS: Final = 8

TenantName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[ -~]+$")]


class ApiKeysError(ValueError):
    """The file of API keys is unusable. The error's message contains no key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a key."""

    tenant: str
    is_operator: bool = False
    """Whether the caller may make operators' calls, such as listing the holders of KV blocks."""
    key_name: str = ""
    """The name of the key in usage reports: `name` in the file of keys or, if the file gives none,
    the first digits of the key's hash."""


@dataclass(frozen=True, slots=True)
class KeysFile:
    """The contents of a file of keys."""

    sha256_to_caller: Mapping[bytes, Caller]
    tenant_to_quota: Mapping[str, Quota]


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current_caller() -> Caller:
    """Return the caller of the call being answered.

    Raises:
        UnauthenticatedError: The call has no API key.
    """
    caller = _caller.get()
    if caller is None:
        raise UnauthenticatedError("an API key is required")
    return caller


def tenant_of_call() -> str:
    """Return the tenant of the call's API key; empty if the router uses no API keys."""
    caller = _caller.get()
    return "" if caller is None else caller.tenant


def key_of_call() -> str:
    """Return the name of the call's API key; empty if the router uses no API keys."""
    caller = _caller.get()
    return "" if caller is None else caller.key_name


def enter_as(tenant: str, key_name: str = "") -> None:
    """Make `tenant` the `current_caller` of this task, which runs a stored call of the tenant.

    A stored call is a response of `/v1/responses` or a line of a batch. `key_name` is the name of
    the key with which a client made the call.
    """
    _caller.set(Caller(tenant, key_name=key_name))


class ApiKeys:
    """The keys that a router accepts, stored and compared as hashes only."""

    def __init__(self, keys: Iterable[str] = (), file: KeysFile | None = None) -> None:
        """`keys` are operators' keys, in plain text."""
        file = file or KeysFile({}, {})
        self.tenant_to_quota = file.tenant_to_quota
        # The time of a lookup depends on the hash. Callers cannot choose hashes, because each hash
        # includes a secret. So timing reveals nothing.
        self._secret = secrets.token_bytes(32)
        self._hash_to_caller = {
            self._hash(sha256): caller
            for sha256, caller in (
                *file.sha256_to_caller.items(),
                *((_sha256(key), _operator(key)) for key in keys),
            )
        }

    def enter(self, authorization: str | None) -> None:
        """Set the `current_caller` of this task to the owner of the key in `authorization`.

        Args:
            authorization: "Bearer KEY", from the HTTP header or gRPC metadata; None: not set.

        Raises:
            UnauthenticatedError: `authorization` has no key, or an unknown key.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != _SCHEME or not key:
            raise UnauthenticatedError("an API key is required: authorization: Bearer KEY")
        caller = self._hash_to_caller.get(self._hash(_sha256(key.strip())))
        if caller is None:
            raise UnauthenticatedError("the API key is unknown")
        _caller.set(caller)

    def _hash(self, sha256: bytes) -> bytes:
        return hmac.digest(self._secret, sha256, "sha256")


def read_keys_file(path: Path) -> KeysFile:
    """Read a TOML file of keys and quotas; docs/security.md describes the file.

    Raises:
        ApiKeysError: The file cannot be read, or has an invalid entry.
    """
    try:
        parsed = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ApiKeysError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ApiKeysError(f"{path}: it must be UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ApiKeysError(f"{path}: it is not TOML: {error}") from None
    except ValidationError as error:
        # The message leaves out the input, which may be a key.
        problems = [
            f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors(include_input=False, include_url=False, include_context=False)
        ]
        raise ApiKeysError(f"{path}: {'; '.join(problems)}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ApiKeysError(f"{path}: it is not TOML: {error}") from None
    except RecursionError:
        raise ApiKeysError(f"{path}: it is nested too deeply") from None
    return KeysFile(
        {
            entry.hash(): Caller(
                entry.tenant, entry.operator, entry.name or entry.hash().hex()[:_NAME_DIGITS]
            )
            for entry in parsed.keys
        },
        {tenant: quota.to_quota() for tenant, quota in parsed.tenants.items()},
    )


def _operator(key: str) -> Caller:
    name = _sha256(key).hex()[:_NAME_DIGITS]
    return Caller(tenant="", is_operator=True, key_name=name)


def _sha256(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Key(_Table):
    tenant: TenantName
    key: Annotated[str, Field(min_length=1, pattern=r"^[!-~]+$")] | None = None
    sha256: Annotated[str, Field(pattern=_SHA256_PATTERN)] | None = None
    operator: bool = False
    name: Annotated[str, Field(max_length=128, pattern=r"^[ -~]*$")] = ""

    @model_validator(mode="after")
    def _is_given_once(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("it must have either key or sha256")
        return self

    def hash(self) -> bytes:
        if self.sha256 is not None:
            return bytes.fromhex(self.sha256)
        assert self.key is not None, "one of them is given"
        return _sha256(self.key)


class _Quota(_Table):
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    max_concurrent_requests: Annotated[int, Field(ge=1)] | None = None
    max_tokens_in_flight: Annotated[int, Field(ge=1)] | None = None

    def to_quota(self) -> Quota:
        return Quota(**self.model_dump())


class _File(_Table):
    keys: Annotated[list[_Key], Field(min_length=1)]
    tenants: dict[TenantName, _Quota] = {}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        hashes = [entry.hash() for entry in self.keys]
        for index, hash_ in enumerate(hashes):
            if hash_ in hashes[:index]:
                raise ValueError(f"keys.{index} is the same as keys.{hashes.index(hash_)}")
        if unknown := self.tenants.keys() - {entry.tenant for entry in self.keys}:
            raise ValueError(f"tenants.{min(unknown)} has no key")
        return self
