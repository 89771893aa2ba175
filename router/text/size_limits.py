"""Checks the sizes of texts and chats before they are tokenized or rendered."""

from collections.abc import Mapping, Sequence
from typing import Any

from contract.errors import ContextLengthError
from contract.request import Model
from contract.value_checks import check_count, check_unicode


def check_text(field: str, text: str, model: Model, max_bytes: int) -> None:
    """Check a text before it is tokenized; with more than `max_bytes` it cannot fit the context."""
    _check_num_bytes(field, check_unicode(field, text), model, max_bytes)


def check_chat(messages: Sequence[Mapping[str, Any]], model: Model, max_bytes: int) -> None:
    """Check the size of a chat's messages before the template renders them."""
    check_count("messages", len(messages), model.max_model_len)
    num_bytes = 0
    for i, message in enumerate(messages):
        for name, value in message.items():
            num_bytes += check_unicode(f"messages[{i}].{name}", str(value))
    _check_num_bytes("messages", num_bytes, model, max_bytes)


def _check_num_bytes(field: str, num_bytes: int, model: Model, most: int) -> None:
    if num_bytes > most:
        raise ContextLengthError(
            field,
            f"has {num_bytes} bytes; at most {most} can fit the model's context of"
            f" {model.max_model_len} tokens",
        )
