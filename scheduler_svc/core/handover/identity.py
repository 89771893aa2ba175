"""The names by which a later scheduler recognizes a sequence, and finds what it swapped out."""

from hashlib import sha256

from contract.hashing import BlockHash, root_hash
from scheduler_svc.core.request import Request


def swap_root(request: Request, output_index: int, *, has_prefix_cache: bool) -> BlockHash:
    """Return the root of the hashes by which a later scheduler finds a swapped sequence's KV.

    Without a prefix cache they are the sequence's own, which no other sequence can have.
    """
    if has_prefix_cache:
        return root_hash(request.cache_salt)
    return BlockHash(identity(request, output_index))


def identity(request: Request, output_index: int) -> bytes:
    """Return 32 bytes by which a later scheduler recognizes a sequence of `request`.

    Only a request that is the same, under the same id, draws the same tokens and may have them.
    Neither the router nor the number of tokens that it knows by then matters.
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
