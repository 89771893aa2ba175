"""`quire lora`: lists, loads and unloads the LoRA adapters of a running service."""

from collections.abc import Sequence
from pathlib import Path

from quire.cli.settings import LoraSettings
from quire.cli.target import scheduler_channel
from quire.v1 import adapters_pb2
from quire.v1.adapters_pb2_grpc import AdapterServiceStub
from rpc.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(LoraSettings, "quire lora", argv)
    with scheduler_channel(settings) as channel:
        stub = AdapterServiceStub(channel)  # type: ignore[no-untyped-call]
        match settings.action:
            case "load":
                print(_load(stub, settings.adapter))
            case "unload":
                stub.UnloadAdapter(adapters_pb2.UnloadAdapterRequest(name=settings.adapter))
                print(f"{settings.adapter} is unloaded")
            case "list":
                listed = stub.ListAdapters(adapters_pb2.ListAdaptersRequest())
                print(describe(listed.adapters))
    return 0


def describe(adapters: Sequence[adapters_pb2.LoadedAdapter]) -> str:
    """Format adapters as a table."""
    if not adapters:
        return "no adapters are loaded"
    width = max(len(each.adapter.name) for each in adapters)
    return "\n".join(
        f"{each.adapter.name:<{width}}  {each.adapter.digest.hex()[:8]}  {each.adapter.directory}"
        + ("  (being unloaded)" if each.is_leaving else "")
        for each in adapters
    )


def _load(stub: AdapterServiceStub, adapter: str) -> str:
    name, _, directory = adapter.partition("=")
    # A relative path is relative to the user's directory, not to a worker's.
    path = Path(directory).expanduser().absolute()
    request = adapters_pb2.LoadAdapterRequest(name=name, directory=str(path))
    loaded = stub.LoadAdapter(request)
    how = "was loaded already" if loaded.was_there else "is loaded"
    return f"{name} {how}: {loaded.adapter.digest.hex()[:8]} from {loaded.adapter.directory}"
