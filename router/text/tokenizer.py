"""Tokenizers of models: text to token ids and back, special tokens, chat template."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

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
    """The tokenizer and chat template of a Hugging Face model directory. Thread-safe.

    It uses the `tokenizers` package, whose native code releases Python's lock, so that threads can
    run it beside the event loop.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        table: TokenTable,
        chat_template: ChatTemplate | None,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`special_tokens` are those that templates name, such as `bos_token`, and their texts."""
        self._tokenizer = tokenizer
        self.table = table
        self.chat_template = chat_template
        self.special_tokens = special_tokens
        self.added_ids = frozenset(tokenizer.get_added_tokens_decoder())
        """Tokens that text is cut at before anything else, such as markers."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text; `add_special_tokens` adds the model's own, such as a leading <s>."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that is this text; None: it is not one token."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def is_special(self, text: str) -> bool:
        """Whether a text is a token that outputs' text does not show."""
        token_id = self.token_id(text)
        return token_id is not None and not self.table.text_pieces[token_id]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, as a `Detokenizer` makes it."""
        detokenizer = Detokenizer(self.table, skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read `tokenizer.json` and the files beside it.

    Raises FileNotFoundError without a `tokenizer.json`, ValueError for an unknown kind of decoder.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()  # left over from training; the router checks lengths
    tokenizer.no_padding()
    # The older file first: the newer one overrides it.
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
        special_tokens,
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
    """Return the text of a special token: a string, or an object with its content."""
    return token if isinstance(token, str) else str(token["content"])


_FLAGS: Final = ""
"""Key of the flags' model."""


class Tokenizers:
    """The current tokenizer, and others that are being read."""

    def __init__(self, first: Tokenizer) -> None:
        """`first` is the flags' model's."""
        self._directory_to_tokenizer = {_FLAGS: first}
        self._directory_to_read: dict[str, asyncio.Task[Tokenizer]] = {}
        """Reads that run, or have ended after their caller was cancelled."""
        self.current = first
        """The served model's."""

    async def read(self, directory: str) -> None:
        """Read the tokenizer of a directory, unless it is known; "" is the flags'.

        If the caller is cancelled, the read continues, for the next call. Raises FileNotFoundError,
        or what else keeps it from being read.
        """
        if directory in self._directory_to_tokenizer:
            return
        read = self._directory_to_read.get(directory)
        if read is None:
            reading = asyncio.to_thread(load_tokenizer, Path(directory))
            read = self._directory_to_read[directory] = asyncio.create_task(reading)
        try:
            tokenizer = await asyncio.shield(read)
        except Exception:
            self._directory_to_read.pop(directory, None)  # it may be there next time
            raise
        self._directory_to_read.pop(directory, None)
        # Here, not in the task: `use` may have removed it in between.
        self._directory_to_tokenizer[directory] = tokenizer

    def num_token_ids(self, directory: str) -> int:
        """Return the vocabulary size of a tokenizer that was read."""
        return len(self._directory_to_tokenizer[directory].table.pieces)

    def use(self, directory: str) -> None:
        """Make a tokenizer that was read the current one; forget others but the flags'."""
        self.current = self._directory_to_tokenizer[directory]
        first = self._directory_to_tokenizer[_FLAGS]
        self._directory_to_tokenizer = {_FLAGS: first, directory: self.current}
        for other, read in list(self._directory_to_read.items()):
            if read.done():
                del self._directory_to_read[other]
