"""The cache salts of LoRA adapters' requests: an adapter's KV is nobody else's."""

from contract.lora import LoraAdapter

ADAPTERS_SALT = "\0"
"""What the cache salts of all adapters' requests begin with, and no others: no client can make up
one of them."""


def adapter_salt(adapter: LoraAdapter) -> str:
    """Return what the cache salts of an adapter's requests begin with, and no others."""
    return f"{ADAPTERS_SALT}{adapter.digest.hex()}{adapter.name}\0"
