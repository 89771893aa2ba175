"""Converts a GGUF file's metadata to tokenizer.json and tokenizer_config.json."""

from enum import IntEnum
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from model_files.errors import ModelError
from model_files.gguf_header import GgufHeader

_SPECIAL_TOKENS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2: Final = rf"{_WORDS}|\p{{N}}|{_REST}"
_CASED: Final = tuple(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    + upper
    + r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    + low
    for upper, low in (("*", "+"), ("+", "*"))
)
_TEKKEN: Final = "|".join((*_CASED, r"\p{N}", _REST.replace(r"[\r\n]*", r"[\r\n/]*")))

_PRE_TOKENIZERS: Final = {
    **dict.fromkeys(("default", "gpt-2"), None),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), r"\p{N}"),
    "tekken": _TEKKEN,
}
"""Maps each supported value of the field `tokenizer.ggml.pre` to the pattern that splits a text
into words. If the pattern is None, GPT-2's pattern splits the text. If the pattern only separates
digits, GPT-2's pattern splits the rest."""
_WITH_GPT2: Final = (None, r"\p{N}")
_IGNORING_MERGES: Final = (_LLAMA3, _TEKKEN)
"""With these patterns, a word that is in the vocabulary becomes one token, without merges, and
texts begin with bos unless the file says otherwise."""


class _TokenKind(IntEnum):
    """The kinds of tokens in a GGUF file."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def to_tokenizer(header: GgufHeader) -> Tokenizer:
    """Make the tokenizer that a GGUF file's metadata describes, to be written to tokenizer.json.

    Raises:
        ModelError: The kind of tokenizer is not supported.
    """
    metadata = _Metadata(header)
    match metadata.get("model"):
        case "gpt2":
            tokenizer, default_bos = _byte_level(metadata)
        case "llama":
            tokenizer, default_bos = _sentence_piece(metadata), True
        case other:
            raise metadata.error("model", f"is {other!r}; supported: 'gpt2' and 'llama'")
    kinds = metadata.get("token_type", [])
    for kind, is_special in (
        (_TokenKind.UNKNOWN, True),
        (_TokenKind.CONTROL, True),
        (_TokenKind.USER_DEFINED, False),
    ):
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=is_special)
                for token, its_kind in zip(metadata.tokens, kinds, strict=False)
                if its_kind == kind
            ]
        )
    before = ["bos_token"] if metadata.get("add_bos_token", default_bos) else []
    after = ["eos_token"] if metadata.get("add_eos_token", False) else []
    special = {name: metadata.special(name) for name in (*before, *after)}
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(special[name] for name in before), "$A", *(special[name] for name in after)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in special.values()],
        )
    return tokenizer


def to_tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json: the special tokens and the chat template."""
    metadata = _Metadata(header)
    config = {
        name: metadata.special(name)
        for name, key in _SPECIAL_TOKENS.items()
        if metadata.get(key) is not None
    }
    template = header.metadata.get("tokenizer.chat_template")
    return config if template is None else {**config, "chat_template": template}


class _Metadata:
    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.tokens: list[str] = self.get("tokens", [])

    def get(self, name: str, default: Any = None) -> Any:
        return self._header.metadata.get(f"tokenizer.ggml.{name}", default)

    def special(self, name: str, default: int | None = None) -> str:
        """Return the text of a special token such as "bos_token".

        If the file does not give the token's id, the id is `default`.
        """
        number = self.get(_SPECIAL_TOKENS[name], default)
        if number is None or not 0 <= number < len(self.tokens):
            raise self.error(
                _SPECIAL_TOKENS[name], f"is {number}; it must be in [0, {len(self.tokens)})"
            )
        return self.tokens[int(number)]

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self._header.path}: tokenizer.ggml.{name} {problem}")


def _byte_level(metadata: _Metadata) -> tuple[Tokenizer, bool]:
    """Return a tokenizer like GPT-2's, and whether texts begin with bos by default."""
    name = metadata.get("pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise metadata.error("pre", f"is {name!r}; supported: {', '.join(_PRE_TOKENIZERS)}")
    pattern = _PRE_TOKENIZERS[name]
    ignores_merges = pattern in _IGNORING_MERGES
    tokenizer = Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(metadata.tokens)},
            [_merge(text) for text in metadata.get("merges", [])],
            ignore_merges=ignores_merges,
        )
    )
    if pattern is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    cut = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *cut,
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in _WITH_GPT2),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, ignores_merges


def _merge(text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    return left, right


def _sentence_piece(metadata: _Metadata) -> Tokenizer:
    """Return a tokenizer like Llama 2's."""
    number_of = {token: number for number, token in enumerate(metadata.tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            number_of,
            _merges_by_score(number_of, metadata.get("scores", [])),
            unk_token=metadata.special("unk_token", default=0),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = metadata.get("add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(number_of: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that merge to a token, by the merged token's score, best first."""
    merges = []
    for token, number in number_of.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in number_of and right in number_of:
                order = -scores[number], number_of[left], number_of[right]
                merges.append((order, (left, right)))
    return [pair for _, pair in sorted(merges)]
