"""How each row's tokens are drawn and when the row ends, as arrays over all rows."""

import numpy as np

from contract.arrays import BoolArray, Float32Array, Int64Array
from contract.pooling import Pooling
from contract.sampling import MAX_STOP_TOKEN_IDS, SamplingParams

NO_TOKEN = -1
"""Pads `SamplingTable.end_token_ids`; no token has this id."""


class SamplingTable:
    """The sampling parameters of all rows, as parallel arrays of length `max_num_seqs`.

    A row's entries are valid from `set` until the next `set` of that row.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        """The vocabulary size if top_k cuts nothing off."""
        self.top_p = np.zeros(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.is_cut = np.zeros(max_num_seqs, np.bool_)
        """Whether top_k, top_p or min_p may cut a token off."""
        self.repetition_penalty = np.zeros(max_num_seqs, np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float32)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.has_penalties = np.zeros(max_num_seqs, np.bool_)
        self.is_limited = np.zeros(max_num_seqs, np.bool_)
        """Whether only the tokens in `allowed` may be drawn."""
        self.has_bias = np.zeros(max_num_seqs, np.bool_)
        self.wants_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.num_top_logprobs = np.zeros(max_num_seqs, np.int64)
        self.wants_prompt_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.num_top_prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        self.has_grammar = np.zeros(max_num_seqs, np.bool_)
        self.is_plain = np.zeros(max_num_seqs, np.bool_)
        """Whether the row wants no log-probabilities, and only a grammar may change its logits."""
        self.end_token_ids = np.full(
            (max_num_seqs, len(eos_token_ids) + MAX_STOP_TOKEN_IDS), NO_TOKEN, np.int64
        )
        """The tokens that end a row: its stop tokens and, unless it ignores them, the model's
        end-of-sequence tokens."""
        self.bias: dict[int, tuple[Int64Array, Float32Array]] = {}
        """Maps a row with a bias to token ids and the numbers added to their logits."""
        self.pools = np.zeros(max_num_seqs, np.bool_)
        """Whether the row pools: its result is a vector, such as an embedding, and not a token."""
        self.pools_all = np.zeros(max_num_seqs, np.bool_)
        """Whether the row's vector needs the hidden states of tokens other than the last."""
        self.pooling: dict[int, Pooling] = {}
        """Maps a row that pools to its pooling."""
        self.allowed: dict[int, Int64Array] = {}
        """Maps a limited row to the only token ids that it may draw."""

    def set(self, row: int, params: SamplingParams) -> None:
        """Give `row` its parameters, which must have a seed."""
        assert params.seed is not None, "the scheduler sends a seed"
        self.seed[row] = params.seed
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k or self.vocab_size
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.is_cut[row] = self.top_k[row] < self.vocab_size or params.top_p < 1 or params.min_p > 0
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.min_tokens[row] = params.min_tokens
        self.has_penalties[row] = params.has_penalties
        self.is_limited[row] = bool(params.allowed_token_ids)
        self.has_bias[row] = bool(params.logit_bias)
        self.wants_logprobs[row] = params.logprobs is not None
        self.num_top_logprobs[row] = params.logprobs or 0
        self.wants_prompt_logprobs[row] = params.prompt_logprobs is not None
        self.num_top_prompt_logprobs[row] = params.prompt_logprobs or 0
        self.has_grammar[row] = params.grammar is not None
        self.is_plain[row] = not (
            params.has_penalties
            or params.logit_bias
            or params.allowed_token_ids
            or params.min_tokens
            or params.logprobs is not None
        )
        ends = params.stop_token_ids + (() if params.ignore_eos else self._eos_token_ids)
        self.pools[row] = params.pooling is not None
        self.pools_all[row] = params.pooling is not None and params.pooling.needs_all
        self.pooling.pop(row, None)
        if params.pooling is not None:
            self.pooling[row] = params.pooling
            ends = ()
        self.end_token_ids[row] = NO_TOKEN
        self.end_token_ids[row, : len(ends)] = ends
        self.allowed.pop(row, None)
        if params.allowed_token_ids:
            self.allowed[row] = np.array(params.allowed_token_ids, np.int64)
        self.bias.pop(row, None)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias.items(), strict=True)
            self.bias[row] = (np.array(ids, np.int64), np.array(values, np.float32))

    def ends(self, rows: Int64Array, token_ids: Int64Array) -> BoolArray:
        """Return bool[N]: whether each token ends its row. `rows`, `token_ids`: int64[N]."""
        is_end: BoolArray = (self.end_token_ids[rows] == token_ids[:, None]).any(1)
        return is_end
