"""The model's tokenizer: text to token ids and back, special tokens, chat template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from router.text.chat_template import ChatTemplate
from router.text.detokenizer import Detokenizer
from router.text.token_bytes import TokenTable, token_table

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """What a Hugging Face model directory says about text. Thread-safe; never changes.

    Read with the `tokenizers` package alone: its work is native code that releases Python's lock,
    so that it can run beside the event loop, in threads.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        table: TokenTable,
        chat_template: ChatTemplate | None,
    ) -> None:
        """See `load_tokenizer`."""
        self._tokenizer = tokenizer
        self.table = table
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds the model's own, such as a leading <s>."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids: what a `Detokenizer` makes of them."""
        detokenizer = Detokenizer(self.table, skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


def load_tokenizer(directory: Path) -> Tokenizer:
    """Reads `tokenizer.json` and what lies beside it.

    Raises FileNotFoundError without a `tokenizer.json`, ValueError if it is of an unknown kind.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()  # a setting left over from training; the router checks lengths
    tokenizer.no_padding()
    # The older file first: what the newer one says, holds.
    config = _read_json(directory / "special_tokens_map.json")
    config |= _read_json(directory / "tokenizer_config.json")
    special_tokens = {
        name: _content(config[name]) for name in _SPECIAL_TOKEN_NAMES if config.get(name)
    }
    special_ids = frozenset(
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or token.content in special_tokens.values()
    )
    source = _chat_template_source(directory, config)
    return Tokenizer(
        tokenizer,
        token_table(tokenizer, special_ids),
        None if source is None else ChatTemplate(source, special_tokens),
    )


def _chat_template_source(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return None if template is None else str(template)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _content(token: str | dict[str, Any]) -> str:
    """A special token is written as a string or as an object with its content."""
    return token if isinstance(token, str) else str(token["content"])
