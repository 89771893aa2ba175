"""Guesses tokens with a small model that has the same vocabulary and separate KV memory.

The small model's pool has as many blocks as the large model's, and a row uses the same block
numbers in both pools, so the scheduler needs no second allocation. This module tracks which KV of
the small model is valid:

    by row      how many tokens have valid KV, counted from the row's first token
    by block    whether all slots of the block have valid KV; this matters when a new row finds the
                block in the prefix cache

The small model lacks the KV of tokens that rows gained without guesses, and of blocks that were
swapped in, because the host holds only the large model's KV. It also lacks the KV of a cached block
if the row that filled the block ended before the small model had computed the block's tokens.
Before the next guess the small model computes the missing tokens, which is cheap. If this module
counts invalid KV as valid, fewer guesses may be accepted, but the output stays right.

Symbols: `N` rows that guess, `K` the largest number of tokens guessed, `S` rows that the small
model computes, `E` hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from contract.arrays import BoolArray, Int64Array
from contract.step import Plan
from contract.worker_limits import Chunk, Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layout import KvDtypes, block_bytes, kv_dtypes
from gpu_worker.memory.transfer import upload
from gpu_worker.models.attention import Decoder
from gpu_worker.models.registry import open_model
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.speculative.drafter import Guesses
from gpu_worker.step.block_moves import Pool
from gpu_worker.step.graphs.cuda_graphs import GraphBackend
from gpu_worker.step.graphs.decode_graphs import DecodeGraphs
from gpu_worker.step.graphs.piecewise_graphs import PiecewiseGraphs
from gpu_worker.step.input_batch import build_input_batch
from gpu_worker.step.model_runner import forward
from gpu_worker.step.rows import Rows, ScheduledRows
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.model_config import ModelConfig


class ModelDrafter:
    """Samples a row's next tokens from the small model, with the sampler of the large model."""

    def __init__(
        self,
        model: Decoder,
        pool: Pool,
        num_draft_tokens: int,
        limits: Limits,
        device: torch.device,
    ) -> None:
        """`pool` belongs to the small model, and has `limits.num_blocks` blocks."""
        self._model = model
        self._pool = pool
        self._num_draft_tokens = num_draft_tokens
        self._limits = limits
        self._device = device
        self._is_valid = np.zeros(limits.num_blocks, np.bool_)
        self._num_computed = np.zeros(limits.max_num_seqs, np.int64)
        # int32[max_num_seqs, K - 1]: computed guesses, after the first `_num_computed` tokens.
        self._computed_guesses = np.zeros((limits.max_num_seqs, num_draft_tokens - 1), np.int32)
        self._num_computed_guesses = np.zeros(limits.max_num_seqs, np.int64)
        self._last_token_ids = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        self._decodes: DecodeGraphs | None = None
        self._pieces: PiecewiseGraphs | None = None

    @torch.inference_mode()
    def capture_decodes(self, backend: GraphBackend, report: Callable[[float], None]) -> None:
        """Capture graphs for a row's second and later guesses.

        To draw such a guess, the small model computes one token of the row. The first guess may
        need more tokens (`capture_pieces`). For the arguments see `ModelRunner.capture_decodes`.
        """
        graphs = DecodeGraphs(self._model, self._pool, self._limits, self._last_token_ids)
        graphs.capture(backend, report)
        self._decodes = graphs

    @torch.inference_mode()
    def capture_pieces(self, backend: GraphBackend, report: Callable[[float], None]) -> None:
        """Capture graphs for a row's first guess; they also compute the row's missing tokens."""
        pieces = PiecewiseGraphs(
            self._model.forward, self._pool, self._limits, self._last_token_ids
        )
        pieces.capture(backend, report)
        self._pieces = pieces

    @property
    def num_draft_tokens(self) -> int:
        return self._num_draft_tokens

    def prepare(self, plan: Plan, rows: Rows) -> None:
        """Copy blocks as the plan says, and mark swapped-in and new blocks as not valid."""
        block_size = self._limits.block_size
        self._is_valid[plan.swap_in_dst_block_ids] = False
        src, dst = plan.copy_src_block_ids, plan.copy_dst_block_ids
        if len(src):
            self._is_valid[dst] = self._is_valid[src]
            where = upload([src.astype(np.int64), dst.astype(np.int64)], self._device)
            self._pool.copy(*where)
        self._is_valid[plan.appended_block_ids] = False
        for new in plan.new_sequences:
            table = rows.block_tables[new.row, : len(new.block_ids)]
            num_full = new.num_computed_tokens // block_size
            self._is_valid[table[num_full:]] = False
            is_valid = self._is_valid[table[:num_full]]
            num_valid = num_full if is_valid.all() else int(np.argmin(is_valid))
            self._num_computed[new.row] = num_valid * block_size
            self._num_computed_guesses[new.row] = 0

    def catch_up(self, rows: Rows, drafting: Int64Array) -> BoolArray:
        """See `Drafter`. If a row lacks the KV of only a few tokens, `guess` computes this KV."""
        self._take_in_guesses(rows, drafting)
        starts = self._num_computed[drafting]  # [N]
        num_left = rows.num_tokens[drafting] - starts
        lags = num_left > self._num_draft_tokens + 1
        if not lags.any():
            return ~lags
        wanted = np.where(lags, num_left - 1, 0)  # `guess` computes the last token
        room = self._limits.max_num_batched_tokens - (np.cumsum(wanted) - wanted)
        lens = np.minimum(wanted, np.maximum(room, 0))  # [N]
        (some,) = np.nonzero(lens)
        chunk = drafting[some]
        self._forward(rows, _scheduled(rows, chunk, starts[some], lens[some], samples=False))
        self._set_computed(rows, chunk, starts[some] + lens[some])
        is_ready: BoolArray = lens == wanted
        return is_ready

    def guess(
        self, rows: Rows, drafting: Int64Array, most: Int64Array, sampler: Sampler
    ) -> Guesses:
        """See `Drafter`.

        To draw a row's next guess, the small model runs on the guess before. So all guesses of a
        row except the last get KV.
        """
        ends = rows.num_tokens[drafting]
        starts = self._num_computed[drafting]
        drawn = []  # by distance: int64[rows that guess this far], on the device
        scheduled = _scheduled(rows, drafting, starts, ends - starts, samples=True)
        for distance in range(int(most.max())):
            (going,) = np.nonzero(most > distance)
            if distance:
                start = ends[going] + distance - 1
                scheduled = _scheduled(
                    rows, drafting[going], start, np.ones_like(going), samples=True
                )
                scheduled = replace(scheduled, num_decodes=len(going))
            drawn.append(self._draw(rows, scheduled, sampler))
        self._set_computed(rows, drafting, ends)
        guesses = np.zeros((len(drafting), len(drawn)), np.int32)
        for distance, token_ids in enumerate(drawn):
            guesses[most > distance, distance] = token_ids.cpu().numpy()
        width = guesses.shape[1] - 1
        self._computed_guesses[drafting, :width] = guesses[:, :width]
        self._num_computed_guesses[drafting] = most - 1
        return [guess[:count] for guess, count in zip(guesses, most.tolist(), strict=True)]

    def _take_in_guesses(self, rows: Rows, drafting: Int64Array) -> None:
        """Count the tokens of right guesses as computed, because their KV is valid."""
        starts = self._num_computed[drafting]
        distances = np.arange(self._num_draft_tokens - 1)  # [K - 1]
        last = rows.token_ids.shape[1] - 1
        known = rows.token_ids[drafting[:, None], np.minimum(starts[:, None] + distances, last)]
        count = np.minimum(self._num_computed_guesses[drafting], rows.num_tokens[drafting] - starts)
        is_right = (known == self._computed_guesses[drafting]) & (distances < count[:, None])
        num_right = np.cumprod(is_right, axis=1).sum(1)  # [N]
        # The last known token is always computed, to sample the next one.
        num_computed = np.minimum(starts + num_right, rows.num_tokens[drafting] - 1)
        self._set_computed(rows, drafting, num_computed)
        self._num_computed_guesses[drafting] = 0

    def _set_computed(self, rows: Rows, which: Int64Array, num_computed: Int64Array) -> None:
        """Set how many tokens of rows `which` are computed, and mark their full blocks as valid."""
        block_size = self._limits.block_size
        first, end = self._num_computed[which] // block_size, num_computed // block_size
        self._num_computed[which] = num_computed
        for i in np.nonzero(first < end)[0].tolist():
            self._is_valid[rows.block_tables[which[i], first[i] : end[i]]] = True

    def _forward(self, rows: Rows, scheduled: ScheduledRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step; return the hidden states `[*, E]` to sample from, and their rows."""
        is_all_known = scheduled.num_decodes == 0
        if self._pieces is not None and self._pieces.takes(scheduled):
            replayed = self._pieces.replay(rows, scheduled, is_all_known=is_all_known)
            return replayed.hidden.index_select(0, replayed.places), replayed.sampling_rows
        batch = build_input_batch(
            rows,
            scheduled,
            self._last_token_ids,
            self._limits.block_size,
            is_all_known=is_all_known,
        )
        hidden = forward(self._model, batch, self._pool, batch.metadata)
        return hidden, batch.sampling_rows

    def _draw(self, rows: Rows, scheduled: ScheduledRows, sampler: Sampler) -> torch.Tensor:
        """Draw a token for each scheduled row: int64[S] on the device."""
        positions = scheduled.positions
        num_outputs = positions - rows.num_prompt[scheduled.rows]
        likeliest = None
        if self._decodes is not None and self._decodes.takes(scheduled):
            decoded = self._decodes.replay(rows, scheduled)
            sampling_rows, logits, likeliest = decoded.rows, decoded.logits, decoded.likeliest
        else:
            hidden, sampling_rows = self._forward(rows, scheduled)
            logits = self._model.logits(hidden)
        sampled = sampler.sample(logits, scheduled.rows, positions, num_outputs, likeliest)
        token_ids = sampled.token_ids.clone()  # a graph's next replay overwrites its results
        self._last_token_ids.index_copy_(0, sampling_rows, token_ids)
        return token_ids


def _scheduled(
    rows: Rows, which: Int64Array, starts: Int64Array, lens: Int64Array, *, samples: bool
) -> ScheduledRows:
    """Schedule a chunk of each of the rows `which`, int64[S].

    With `samples`, each row samples a token at the end of its chunk.
    """
    sampling = np.arange(len(which) if samples else 0)
    return ScheduledRows(
        rows=which,
        starts=starts,
        lens=lens,
        num_decodes=0,
        sampling=sampling,
        positions=(starts + lens)[sampling],
        incarnations=rows.incarnation[which],
    )


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """The small model, loaded, without KV memory yet."""

    model: Decoder
    config: ModelConfig
    kv_dtypes: KvDtypes
    _device: torch.device

    def block_bytes(self, block_size: int) -> int:
        """Return the size of a block in the small model's pool, in bytes."""
        return block_bytes(self.config, block_size, self.kv_dtypes)

    def drafter(self, num_draft_tokens: int, limits: Limits) -> ModelDrafter:
        """Allocate a pool with as many blocks as the large model's, and build the drafter."""
        pool = KvPool(
            self.config, limits.num_blocks, limits.block_size, self.kv_dtypes, self._device
        )
        return ModelDrafter(self.model, pool, num_draft_tokens, limits, self._device)


def load_draft_model(
    directory: Path,
    model_directory: Path,
    limits: Limits,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftModel:
    """Load the small model in `directory`, to guess for the large model in `model_directory`.

    Raises:
        ModelError: The small model cannot be loaded, or cannot guess for the large model.
    """
    source = open_model(directory, max_model_len=limits.max_model_len)
    config = source.config
    if config.num_states or any(isinstance(window, Chunk) for window in config.windows):
        raise ModelError(
            f"draft-model is {directory}; it must not have recurrent layers or chunked attention"
        )
    if config.vocab_size != limits.vocab_size or _vocabulary(directory) != _vocabulary(
        model_directory
    ):
        raise ModelError(
            f"draft-model is {directory}; its vocabulary must be that of {model_directory.name}"
        )
    if config.max_model_len < limits.max_model_len:
        raise ModelError(
            f"draft-model is {directory}, which takes at most {config.max_model_len} tokens;"
            f" max-model-len is {limits.max_model_len}"
        )
    model = source.load(dtype, device, lambda _: None)
    dtypes = kv_dtypes("auto", frozenset(), dtype, config.num_layers)
    return DraftModel(model, config, dtypes, device)


def _vocabulary(directory: Path) -> dict[str, int]:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"draft-model needs tokenizer.json of both models; there is no {path}")
    vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab()
    return vocabulary
