"""Tokenizers of models, with their special tokens and chat templates."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import tokenizers

from contract.errors import InvalidArgumentError
from model_files.locate import DEFAULT_CACHE_DIR, find_model
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

    The `tokenizers` package releases the GIL, so threads can tokenize while the event loop runs.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        table: TokenTable,
        chat_template: ChatTemplate | None,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`special_tokens` maps the names that templates use, such as `bos_token`, to texts."""
        self._tokenizer = tokenizer
        self.table = table
        self.chat_template = chat_template
        self.special_tokens = special_tokens
        self.added_ids = frozenset(tokenizer.get_added_tokens_decoder())
        """Ids of added tokens, such as markers. Text is split at these tokens first."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text; `add_special_tokens` adds tokens such as a leading <s>."""
        # `encode` is not used: from a thread's second call on, it holds the GIL (version 0.23), and
        # it takes more memory because it also returns the position of each token in the text.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def encode_whole(
        self, text: str, pair: str | None, most: int | None, *, add_special_tokens: bool
    ) -> tuple[list[int], int]:
        """Tokenize a text, or a pair of texts, for pooling.

        Args:
            text: The text, or the first text of the pair.
            pair: The second text of the pair; None: no pair.
            most: Maximum number of tokens; the text, or the second text of a pair, is cut to fit.
            add_special_tokens: Whether to add tokens such as [CLS] and [SEP].

        Returns:
            The token ids, and how many of them belong to the first text of a pair. The number is 0
            without a pair, or if the tokenizer gives both texts the same token type.

        Raises:
            InvalidArgumentError: `most` is so small that no token would be left of the text, or of
                the second text of a pair.
        """
        texts = [text] if pair is None else [text, pair]
        parts = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if most is not None:
            room = most - sum(len(part) for part in parts[:-1])
            if add_special_tokens:
                room -= self._tokenizer.num_special_tokens_to_add(pair is not None)
            if room < 1:
                raise InvalidArgumentError(
                    "truncate_prompt_tokens",
                    f"is {most}; {1 - room} more are needed to keep a token of the text",
                )
            parts[-1].truncate(room)
        second = None if pair is None else parts[1]
        whole = self._tokenizer.post_process(parts[0], second, add_special_tokens)
        types: list[int] = whole.type_ids
        return whole.ids, types.index(1) if 1 in types else 0

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text; None: no single token has this text."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def is_special(self, text: str) -> bool:
        """Whether `text` is a special token, which outputs do not show."""
        token_id = self.token_id(text)
        return token_id is not None and not self.table.text_pieces[token_id]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode token ids with a `Detokenizer`."""
        detokenizer = Detokenizer(self.table, skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read `tokenizer.json` and the files beside it.

    Raises FileNotFoundError if there is no `tokenizer.json`, and ValueError for an unknown kind of
    decoder.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()  # a setting for training; the router checks lengths
    tokenizer.no_padding()
    # Read the older format first, so that the newer one overrides it.
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
    if isinstance(template, list):  # several templates by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return None if template is None else str(template)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _content(token: str | dict[str, Any]) -> str:
    """Return the text of a special token, which files give as a string or as an object."""
    return token if isinstance(token, str) else str(token["content"])


_FLAGS: Final = ""
"""The key of the model from the flags."""


class Tokenizers:
    """Reads tokenizers; keeps those of the served model and of the model from the flags."""

    def __init__(self, first: Tokenizer, cache_dir: Path = DEFAULT_CACHE_DIR) -> None:
        """`first` is the tokenizer of the flags' model; for `cache_dir` see `find_model`."""
        self._cache_dir = cache_dir
        self._directory_to_tokenizer = {_FLAGS: first}
        self._directory_to_read: dict[str, asyncio.Task[Tokenizer]] = {}
        """Tasks that read tokenizers. A task whose callers were cancelled stays in this mapping
        after the task has ended, until `use` removes it."""
        self.current = first
        """The tokenizer of the served model."""

    async def read(self, directory: str) -> None:
        """Read the tokenizer of a model's directory, unless the tokenizer was read before.

        The `directory` "" means the model from the flags. If the caller is cancelled, the read
        continues for the next call. May raise ModelError, FileNotFoundError, or any other error
        that prevented the read.
        """
        if directory in self._directory_to_tokenizer:
            return
        read = self._directory_to_read.get(directory)
        if read is None:
            reading = asyncio.to_thread(self._load, directory)
            read = self._directory_to_read[directory] = asyncio.create_task(reading)
        try:
            tokenizer = await asyncio.shield(read)
        except Exception:
            self._directory_to_read.pop(directory, None)  # the next call tries again
            raise
        self._directory_to_read.pop(directory, None)
        # Set this here, not in the task, because `use` may have removed the task's entry.
        self._directory_to_tokenizer[directory] = tokenizer

    def _load(self, model: str) -> Tokenizer:
        return load_tokenizer(find_model(model, self._cache_dir, with_weights=False))

    def num_token_ids(self, directory: str) -> int:
        """Return the vocabulary size of a tokenizer that has been read."""
        return len(self._directory_to_tokenizer[directory].table.pieces)

    def use(self, directory: str) -> None:
        """Make the tokenizer of `directory` the current one; the tokenizer must have been read.

        Drops all other tokenizers, except the one of the model from the flags.
        """
        self.current = self._directory_to_tokenizer[directory]
        first = self._directory_to_tokenizer[_FLAGS]
        self._directory_to_tokenizer = {_FLAGS: first, directory: self.current}
        for other, read in list(self._directory_to_read.items()):
            if read.done():
                del self._directory_to_read[other]
