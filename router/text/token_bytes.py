r"""Computes the bytes that each token of a vocabulary adds to a text.

The `decoder` of a `tokenizer.json` defines how token strings become text. The decoder of a language
model converts each token without regard to its neighbours, except that it may remove a space at the
beginning of a text (`LeadingSpace`). So the whole vocabulary can be converted to bytes once:

* byte-level (GPT-2, Llama 3, Qwen): each character of the token stands for one byte;
* SentencePiece-like (Llama 2, Mistral, Gemma): "▁" stands for a space, `<0xE2>` for one byte;
* WordPiece (BERT): there is a space before each token, unless the token begins with "##".
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import tokenizers

_CLEANED = {
    **{f" {end}": end for end in (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re")},
    " ' ": "'",
    " do not": " don't",
}
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class LeadingSpace(Enum):
    """How to treat the space that SentencePiece puts before the first word."""

    KEEP = "keep"
    STRIP_ONE = "strip one"
    """Remove the first space of the text."""
    STRIP_FIRST_TOKEN = "strip first token"  # noqa: S105
    """Remove all spaces of the first token."""

    def strip(self, piece: bytes) -> bytes:
        """Apply this treatment to `piece`, the bytes of a text's first token."""
        match self:
            case LeadingSpace.KEEP:
                return piece
            case LeadingSpace.STRIP_ONE:
                return piece.removeprefix(b" ")
            case LeadingSpace.STRIP_FIRST_TOKEN:
                return piece.replace(b" ", b"")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """A table of the bytes that each token adds to a text; `Detokenizer` uses the table."""

    pieces: list[bytes]
    """The bytes of each token, by token id; for a special token, its name."""
    text_pieces: list[bytes]
    """Like `pieces`, but empty for special tokens."""
    leading_space: LeadingSpace
    max_piece_bytes: int
    """The length of the longest piece."""


def token_table(tokenizer: tokenizers.Tokenizer, special_ids: frozenset[int]) -> TokenTable:
    """Make the table of a tokenizer; raises ValueError for an unknown kind of decoder."""
    steps = _flatten(json.loads(tokenizer.to_str()).get("decoder"))
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        pieces[token_id] = _piece(token, steps)
    return TokenTable(
        pieces=pieces,
        text_pieces=[b"" if i in special_ids else piece for i, piece in enumerate(pieces)],
        leading_space=_leading_space(steps),
        max_piece_bytes=max(map(len, pieces), default=0),
    )


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise ValueError("the tokenizer has no decoder, which defines how tokens become text")
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    supported = (
        decoder["type"] in {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "WordPiece"}
        or (decoder["type"] == "Replace" and "String" in decoder["pattern"])
        or (
            decoder["type"] == "Strip"
            and (decoder["start"], decoder["stop"], decoder["content"]) == (1, 0, " ")
        )
    )
    if not supported:
        raise ValueError(
            f"the tokenizer's decoder has the step {dict(decoder)}; supported are ByteLevel, "
            "ByteFallback, Fuse, Metaspace, WordPiece, Replace of a string, and Strip of one "
            "leading space"
        )
    return [decoder]


def _leading_space(steps: list[Mapping[str, Any]]) -> LeadingSpace:
    for step in steps:
        if step["type"] == "WordPiece" or (step["type"] == "Strip" and step["start"] == 1):
            return LeadingSpace.STRIP_ONE
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return LeadingSpace.STRIP_FIRST_TOKEN
    return LeadingSpace.KEEP


def _piece(token: str, steps: list[Mapping[str, Any]]) -> bytes:
    for step in steps:
        match step["type"]:
            case "Replace":
                token = token.replace(step["pattern"]["String"], step["content"])
            case "Metaspace":
                token = token.replace(step["replacement"], " ")
            case "ByteFallback" if byte := _BYTE_TOKEN.fullmatch(token):
                return bytes.fromhex(byte[1])
            case "WordPiece":
                token = _word_piece(token, step["prefix"], is_cleaned=step["cleanup"])
            case "ByteLevel":
                return _byte_level_piece(token)
    return token.encode()


def _word_piece(token: str, prefix: str, *, is_cleaned: bool) -> str:
    token = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
    if is_cleaned:  # token by token, like the `tokenizers` package
        for dirty, clean in _CLEANED.items():
            token = token.replace(dirty, clean)
    return token


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes(map(_CHARACTER_TO_BYTE.__getitem__, token))
    except KeyError:  # an added token is literal text
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    # GPT-2's alphabet: printable Latin-1 characters are themselves; the other bytes, in order, are
    # the characters from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_CHARACTER_TO_BYTE = _byte_alphabet()
