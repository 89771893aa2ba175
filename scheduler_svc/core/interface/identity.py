"""Identifies a sequence, and its swapped-out KV, so that a later scheduler can find them."""

from hashlib import sha256

from contract.hashing import BlockHash, root_hash
from scheduler_svc.core.interface.request import Request


def swap_root(request: Request, output_index: int, *, has_prefix_cache: bool) -> BlockHash:
    """Return the root of the hash chain by which a later scheduler finds a swapped sequence's KV.

    Without a prefix cache the root is unique to the sequence, so no other sequence finds its KV.
    """
    if has_prefix_cache:
        return root_hash(request.cache_salt)
    return BlockHash(identity(request, output_index))


def identity(request: Request, output_index: int) -> bytes:
    """Return 32 bytes that identify a sequence of `request` to a later scheduler.

    The bytes are a hash of the request's id, tenant, cache salt, sampling and search parameters,
    its maximum number of output tokens, the number of prompt tokens, and the output's index. So
    the bytes stay the same when a router learns of more output tokens, or when another router
    submits the request. The hash does not include the tokens, so a later scheduler also
    checks that the tokens agree.
    """
    parts = (
        b"quire.v1.sequence\0",
        root_hash(request.cache_salt),
        sha256(request.request_id.encode()).digest(),
        sha256(request.tenant.encode()).digest(),
        sha256(request.sampling).digest(),
        output_index.to_bytes(4, "little"),
        len(request.prompt_token_ids).to_bytes(8, "little"),
        request.max_tokens.to_bytes(8, "little"),
        b"" if request.beam is None else repr((request.beam, request.min_tokens)).encode(),
    )
    return sha256(b"".join(parts)).digest()
