"""What `quire.v1.AdapterService` asks and answers, to domain values and back."""

from quire.v1 import adapters_pb2, common_pb2
from router.domain import HeldAdapter, LoadedAdapter, LoraAdapter
from router.grpc.wire import adapter_from_proto


def loaded_from_proto(message: adapters_pb2.LoadAdapterResponse) -> LoadedAdapter:
    """Reads what a scheduler says it has loaded."""
    return LoadedAdapter(adapter_from_proto(message.adapter), message.was_there)


def loaded_to_proto(loaded: LoadedAdapter) -> adapters_pb2.LoadAdapterResponse:
    """Writes what was loaded."""
    return adapters_pb2.LoadAdapterResponse(
        adapter=_adapter_to_proto(loaded.adapter), was_there=loaded.was_there
    )


def held_from_proto(message: adapters_pb2.LoadedAdapter) -> HeldAdapter:
    """Reads one of those that a scheduler lists."""
    return HeldAdapter(adapter_from_proto(message.adapter), message.is_leaving)


def held_to_proto(held: HeldAdapter) -> adapters_pb2.LoadedAdapter:
    """Writes one of a list."""
    return adapters_pb2.LoadedAdapter(
        adapter=_adapter_to_proto(held.adapter), is_leaving=held.is_leaving
    )


def _adapter_to_proto(adapter: LoraAdapter) -> common_pb2.LoraAdapter:
    return common_pb2.LoraAdapter(
        name=adapter.name, digest=adapter.digest, directory=adapter.directory
    )
