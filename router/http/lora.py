"""Loads and unloads LoRA adapters over HTTP, with vLLM's routes."""

from types import MappingProxyType

from contract.errors import InvalidArgumentError
from router.http.endpoint import peer_of
from router.http.errors import error_with_json_names
from router.http.strict_json import Schema
from router.operators.adapters_and_models import Operations

_FIELD_TO_JSON = {"name": "lora_name", "directory": "lora_path", "model": "base_model_name"}


class LoadAdapterBody(Schema):
    """The body of POST /v1/load_lora_adapter."""

    unimplemented = MappingProxyType({"load_inplace": (False,), "is_3d_lora_weight": (False,)})

    lora_name: str
    lora_path: str
    base_model_name: str = ""
    """The adapter's base model; required if several are served."""


class UnloadAdapterBody(Schema):
    """The body of POST /v1/unload_lora_adapter."""

    unimplemented = MappingProxyType({"lora_int_id": ()})

    lora_name: str


async def load_adapter(operations: Operations, body: LoadAdapterBody, remote: str | None) -> str:
    """Load an adapter for a caller at address `remote`; return the text that vLLM would answer."""
    try:
        loaded = await operations.load_adapter(
            body.lora_name, body.lora_path, peer_of(remote), body.base_model_name
        )
    except InvalidArgumentError as error:
        raise error_with_json_names(_FIELD_TO_JSON, error) from error
    done = "was there already" if loaded.was_there else "added successfully"
    return f"Success: LoRA adapter {body.lora_name!r} {done}."


async def unload_adapter(
    operations: Operations, body: UnloadAdapterBody, remote: str | None
) -> str:
    """Unload an adapter; return the text that vLLM would answer. May raise QuireError."""
    await operations.unload_adapter(body.lora_name, peer_of(remote))
    return f"Success: LoRA adapter {body.lora_name!r} removed successfully."
