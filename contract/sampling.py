"""Sampling parameters, which say how tokens are drawn and when an output ends; and their limits.

The Python client, the router and the worker share the classes of this module. `SamplingParams`,
`StructuredOutput` and `BeamSearch` have the same fields as the messages of these names in
`quire.v1`; the protos document each field.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from contract.errors import InvalidArgumentError
from contract.lora import LoraAdapter
from contract.pooling import Pooling
from contract.value_checks import check_count, check_range, check_token_ids

MAX_TEMPERATURE: Final = 100
MAX_REPETITION_PENALTY: Final = 100
MAX_PENALTY: Final = 2
"""Largest absolute value of the presence and frequency penalties."""
MAX_SEED: Final = 2**64 - 1
MAX_LOGIT_BIAS_ENTRIES: Final = 1024
MAX_LOGIT_BIAS: Final = 100
MAX_STOP_TOKEN_IDS: Final = 64
MAX_ALLOWED_TOKEN_IDS: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_CANDIDATES: Final = 1024
"""A worker reports at most this many candidates for the next token of a beam, each with its
log-probability."""
MIN_BEAM_WIDTH: Final = 2
MAX_BEAM_WIDTH: Final = 10
MAX_LENGTH_PENALTY: Final = 5
MAX_GRAMMAR_BYTES: Final = 2**19
"""The limit on bytes of a grammar. The router makes a grammar from a JSON schema, regex or choice
of at most 64 KiB, and each byte may become six characters of the grammar."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an output must follow; exactly one field is set."""

    json_schema: str | Mapping[str, object] | None = None
    """A JSON schema, as text or as an object."""
    json_object: bool = False
    """Whether the output must be a JSON object, with any members."""
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark. The router converts every other form to a grammar;
    workers accept only grammars."""

    @property
    def form(self) -> str:
        """The name of the field that is set.

        Raises InvalidArgumentError unless exactly one field is set.
        """
        given = [
            name
            for name in ("json_schema", "json_object", "regex", "choice", "grammar")
            if getattr(self, name) not in (None, False)
        ]
        if len(given) != 1:
            raise InvalidArgumentError(
                "structured", f"sets {', '.join(given) or 'nothing'}; it must set exactly one form"
            )
        return given[0]

    def check_grammar(self, field: str) -> None:
        """Raise InvalidArgumentError unless `grammar` is set and has an allowed size."""
        if not self.grammar:
            raise InvalidArgumentError(f"{field}.grammar", "is not set")
        if (num_bytes := len(self.grammar.encode())) > MAX_GRAMMAR_BYTES:
            raise InvalidArgumentError(
                f"{field}.grammar",
                f"has {num_bytes} bytes; it must have at most {MAX_GRAMMAR_BYTES}",
            )

    @property
    def schema_text(self) -> str:
        """The JSON schema as text; empty if there is no schema."""
        if self.json_schema is None or isinstance(self.json_schema, str):
            return self.json_schema or ""
        return json.dumps(self.json_schema)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """0: keep all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """None: the router draws one. The worker adds the output's index to the request's seed."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Maps a token id to the number that is added to its logit."""
    max_tokens: int | None = None
    """None: up to the model's maximum length."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; empty: all."""
    logprobs: int | None = None
    """For each output token, report its log-probability, and those of this many likeliest tokens.
    None: report no log-probabilities."""
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    adapter: LoraAdapter | None = None
    """Set by the router from the request's model, never by a client."""
    pooling: Pooling | None = None
    """If set, the worker computes an embedding or a score of the prompt and draws no tokens. Set by
    the router, never by a client."""

    @property
    def grammar(self) -> str | None:
        """The grammar that the worker applies; None: the output has no required form."""
        return None if self.structured is None else self.structured.grammar

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes the logits of tokens that have already occurred."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check(
        self, field: str, *, vocab_size: int, max_model_len: int, max_logprobs: int = MAX_LOGPROBS
    ) -> None:
        """Check all fields but `structured`, `adapter` and `pooling`.

        `field` names the parameters in error messages: if `field` is "sampling", an error about
        `top_k` names "sampling.top_k".

        Raises:
            InvalidArgumentError: A value is out of its range.
        """
        most_tokens = max_model_len if self.max_tokens is None else self.max_tokens
        for name, value, least, most in (
            ("temperature", self.temperature, 0, MAX_TEMPERATURE),
            ("top_k", self.top_k, 0, vocab_size),
            ("min_p", self.min_p, 0, 1),
            ("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
            ("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
            ("seed", self.seed or 0, 0, MAX_SEED),
            ("max_tokens", most_tokens, 1, max_model_len),
            ("min_tokens", self.min_tokens, 0, most_tokens),
            ("logprobs", self.logprobs or 0, 0, max_logprobs),
            ("prompt_logprobs", self.prompt_logprobs or 0, 0, max_logprobs),
        ):
            if not least <= value <= most:  # false for NaN; the name is built for errors only
                check_range(f"{field}.{name}", value, least, most)
        for name, value, most in (
            ("top_p", self.top_p, 1),
            ("repetition_penalty", self.repetition_penalty, MAX_REPETITION_PENALTY),
        ):
            if not 0 < value <= most:
                check_range(f"{field}.{name}", value, 0, most, open_below=True)
        if self.min_tokens and self.allowed_token_ids:
            raise InvalidArgumentError(
                f"{field}.allowed_token_ids", "is set; with min_tokens it must not be"
            )
        check_count(f"{field}.stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        check_token_ids(f"{field}.stop_token_ids", self.stop_token_ids, vocab_size)
        check_count(
            f"{field}.allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS
        )
        check_token_ids(f"{field}.allowed_token_ids", self.allowed_token_ids, vocab_size)
        check_count(f"{field}.logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS_ENTRIES)
        for token_id, bias in self.logit_bias.items():
            if not 0 <= token_id < vocab_size:
                raise InvalidArgumentError(
                    f"{field}.logit_bias",
                    f"has the token id {token_id}; it must be in [0, {vocab_size})",
                )
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                check_range(
                    f"{field}.logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS
                )


class EarlyStopping(StrEnum):
    """When a beam search may end before its beams reach their maximum length.

    The search never ends before it has as many complete outputs as beams. In
    `transformers`, HEURISTIC is False, WHEN_FULL is True, and NEVER is "never".
    """

    HEURISTIC = "heuristic"
    """End when the best beam, if it stopped now, would not beat the worst complete output."""
    WHEN_FULL = "when_full"
    """End as soon as there are as many complete outputs as beams."""
    NEVER = "never"
    """End when no beam can beat the worst complete output any more, however long it becomes."""

    @classmethod
    def of(cls, word: "EarlyStopping | bool | Literal['never']") -> "EarlyStopping":
        """Convert a value that `transformers` uses; return a member of this class unchanged."""
        if isinstance(word, bool):
            return cls.WHEN_FULL if word else cls.HEURISTIC
        return cls(word)


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """The parameters of a beam search, which finds likely outputs instead of drawing tokens."""

    width: int
    """Number of beams, and of complete outputs, that the search keeps."""
    length_penalty: float = 1.0
    """An output's score is its log-probability ÷ (number of output tokens ^ length_penalty)."""
    early_stopping: EarlyStopping | bool | Literal["never"] = EarlyStopping.HEURISTIC

    def check(self, n: int) -> None:
        """Raise InvalidArgumentError unless the parameters are valid for `n` outputs."""
        check_range("beam.width", self.width, MIN_BEAM_WIDTH, MAX_BEAM_WIDTH)
        check_range("n", n, 1, self.width)
        check_range(
            "beam.length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
