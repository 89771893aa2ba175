"""How tokens are drawn and when an output ends: the parameters, with their limits.

The Python client, the router and the worker share these classes. `quire.v1.SamplingParams`,
`StructuredOutput` and `BeamSearch` have the same fields and explain each.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from contract.errors import InvalidArgumentError
from contract.lora import LoraAdapter
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
"""Most log-probabilities of one position that a worker reports: the candidates of a beam search."""
MIN_BEAM_WIDTH: Final = 2
MAX_BEAM_WIDTH: Final = 10
MAX_LENGTH_PENALTY: Final = 5


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an output must have; exactly one field is set."""

    json_schema: str | Mapping[str, object] | None = None
    """A JSON schema, as text or as an object."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """In llguidance's dialect of Lark. The router makes it of the others, for the worker."""

    @property
    def form(self) -> str:
        """The name of the field that is set; raises InvalidArgumentError unless exactly one is."""
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

    @property
    def schema_text(self) -> str:
        """The JSON schema as text; empty without one."""
        if self.json_schema is None or isinstance(self.json_schema, str):
            return self.json_schema or ""
        return json.dumps(self.json_schema)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are drawn, and when its outputs end."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """None: the router picks one. At the worker: the seed of the output, its index added."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to what is added to its logit."""
    max_tokens: int | None = None
    """None: as many as the model's context has room for."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; none: all."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report with each token; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    adapter: LoraAdapter | None = None
    """Set by the router from the request's model, never by a client."""

    @property
    def grammar(self) -> str | None:
        """The form as a grammar, which a worker follows; None: there is none."""
        return None if self.structured is None else self.structured.grammar

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check(
        self, field: str, *, vocab_size: int, max_model_len: int, max_logprobs: int = MAX_LOGPROBS
    ) -> None:
        """Check each field but `structured` and `adapter`; `field` is the prefix in errors.

        Raises:
            InvalidArgumentError: It names field, value and limit.
        """
        check_range(f"{field}.temperature", self.temperature, 0, MAX_TEMPERATURE)
        check_range(f"{field}.top_k", self.top_k, 0, vocab_size)
        check_range(f"{field}.top_p", self.top_p, 0, 1, open_below=True)
        check_range(f"{field}.min_p", self.min_p, 0, 1)
        check_range(
            f"{field}.repetition_penalty",
            self.repetition_penalty,
            0,
            MAX_REPETITION_PENALTY,
            open_below=True,
        )
        check_range(f"{field}.presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_range(f"{field}.frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_range(f"{field}.seed", self.seed or 0, 0, MAX_SEED)
        if self.max_tokens is not None:
            check_range(f"{field}.max_tokens", self.max_tokens, 1, max_model_len)
        check_range(f"{field}.min_tokens", self.min_tokens, 0, self.max_tokens or max_model_len)
        if self.min_tokens and self.allowed_token_ids:
            raise InvalidArgumentError(
                f"{field}.allowed_token_ids", "is set; with min_tokens it must not be"
            )
        check_range(f"{field}.logprobs", self.logprobs or 0, 0, max_logprobs)
        check_range(f"{field}.prompt_logprobs", self.prompt_logprobs or 0, 0, max_logprobs)
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
            check_range(f"{field}.logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


class EarlyStopping(StrEnum):
    """When a beam search may end before its beams reach their greatest length.

    It always needs as many complete outputs as beams. `transformers` says False, True and "never".
    """

    HEURISTIC = "heuristic"
    """When the best beam, if it ended now, would score worse than the worst complete output."""
    WHEN_FULL = "when_full"
    """At once."""
    NEVER = "never"
    """When no beam can reach a better score than the worst complete output, at any length."""

    @classmethod
    def of(cls, word: "EarlyStopping | bool | Literal['never']") -> "EarlyStopping":
        """Return the member for itself, or for `transformers`' word."""
        if isinstance(word, bool):
            return cls.WHEN_FULL if word else cls.HEURISTIC
        return cls(word)


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """A search for the likeliest outputs, instead of draws."""

    width: int
    """Beams, and complete outputs, that are kept."""
    length_penalty: float = 1.0
    """A score is the sum of log-probabilities ÷ number of output tokens ^ this."""
    early_stopping: EarlyStopping | bool | Literal["never"] = EarlyStopping.HEURISTIC

    def check(self, n: int) -> None:
        """Check the search, and that it can give `n` outputs; raises InvalidArgumentError."""
        check_range("beam.width", self.width, MIN_BEAM_WIDTH, MAX_BEAM_WIDTH)
        check_range("n", n, 1, self.width)
        check_range(
            "beam.length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
