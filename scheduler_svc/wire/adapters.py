"""LoRA adapters, from workers and to routers."""

from contract.errors import InvalidArgumentError
from contract.lora import LoraAdapter
from quire.v1 import common_pb2

_DIGEST_BYTES = 32


def adapter_from_proto(message: common_pb2.LoraAdapter, field: str) -> LoraAdapter:
    """Take what a worker says of an adapter, in `field`.

    Raises:
        InvalidArgumentError: It has no name, or a digest of another length.
    """
    if not message.name or len(message.digest) != _DIGEST_BYTES:
        raise InvalidArgumentError(
            field,
            f"has {message.name!r} with a digest of {len(message.digest)} bytes; each must have a"
            f" name and {_DIGEST_BYTES} bytes",
        )
    return LoraAdapter(message.name, message.digest, message.directory)


def adapter_to_proto(adapter: LoraAdapter) -> common_pb2.LoraAdapter:
    """Say which it is, and where it is."""
    return common_pb2.LoraAdapter(
        name=adapter.name, digest=adapter.digest, directory=adapter.directory
    )
