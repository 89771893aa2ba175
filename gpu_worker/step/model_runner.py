"""Runs the model on a scheduled step: gathers inputs, computes, scores prompts, samples.

Symbols: `N` tokens whose final hidden states are wanted, `E` hidden size.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import structlog
import torch

from contract.arrays import Int64Array
from contract.worker_limits import Limits
from gpu_worker import metrics
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.lora.step_adapters import NO_ADAPTERS
from gpu_worker.models.attention import AttentionMetadata, Decoder
from gpu_worker.sampling.sampled_tokens import Sampled
from gpu_worker.sampling.sampler import sample_others
from gpu_worker.sampling.shared_sampling import Sampling
from gpu_worker.step.graphs.cuda_graphs import GraphBackend, do_nothing
from gpu_worker.step.graphs.decode_graphs import Decoded, DecodeGraphs
from gpu_worker.step.graphs.piecewise_graphs import PiecewiseGraphs
from gpu_worker.step.input_batch import InputBatch, build_input_batch
from gpu_worker.step.pooling import Pooler, sample_or_pool
from gpu_worker.step.prompt_logprobs import PromptScoresReadback, score_prompts
from gpu_worker.step.rows import Rows, ScheduledRows
from gpu_worker.step.step_halving import TokenLimit, halves
from gpu_worker.weights.json_fields import ModelError
from rpc.observe import timeline

_log = structlog.get_logger()
_G = TypeVar("_G", DecodeGraphs, PiecewiseGraphs)


def forward(
    model: Decoder, batch: InputBatch, pool: Any, metadata: AttentionMetadata
) -> torch.Tensor:
    """Compute a batch; return the final hidden states `[N, E]` of the tokens that `metadata` wants.

    Raises:
        ModelError: The model, perhaps a user's class, returned a wrong number of hidden states.
    """
    hidden = model.forward(batch.token_ids, batch.positions, pool, metadata)
    if len(hidden) != metadata.num_wanted:
        raise ModelError(
            f"{type(model).__name__}.forward returned hidden states of {len(hidden)} tokens;"
            f" metadata.num_wanted is {metadata.num_wanted}"
        )
    return hidden


class ModelRunner:
    """Computes scheduled steps with a model and a sampler.

    Used by one thread, in `torch.inference_mode()`.
    """

    def __init__(
        self,
        model: Decoder,
        pool: Any,
        rows: Rows,
        sampler: Sampling,
        limits: Limits,
        device: torch.device,
        *,
        takes_parts: bool,
        is_all_known: bool,
        adapters: Mapping[int, Adapter] = NO_ADAPTERS,
        slots: AdapterSlots | None = None,
        before_launch: Callable[[], None] = do_nothing,
    ) -> None:
        """`adapters` maps numbers in `rows.adapter` to adapters.

        The mapping may change between steps.

        `slots` hold adapters for CUDA graphs; None: steps with adapters run without graphs.

        `before_launch` is called after a step's inputs are enqueued, right before the model runs.

        `takes_parts` allows splitting a step when memory is short. With several ranks `takes_parts`
        is False, because all ranks must compute a step in the same parts, but only the rank that is
        short of memory knows that the step must be split.

        `is_all_known`: whether `rows` has the values of all earlier tokens when a step begins. If
        not, a decoding row's last token is read from the device.
        """
        self._model = model
        self._pool = pool
        self._rows = rows
        self._sampler = sampler
        self._limits = limits
        self._device = device
        self._takes_parts = takes_parts
        self._is_all_known = is_all_known
        self._adapters = adapters
        self._slots = slots
        self._before_launch = before_launch
        self._last_token_ids = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        self._pooler = Pooler(sampler.table, model)
        # The key says whether the graphs are for rows with adapters.
        self._decodes: dict[bool, DecodeGraphs] = {}
        self._pieces: dict[bool, PiecewiseGraphs] = {}
        self._token_limit = TokenLimit()

    def capture_decodes(
        self,
        backend: GraphBackend,
        report: Callable[[float], None],
        *,
        shares_prefixes: bool = False,
        has_adapters: bool = False,
    ) -> None:
        """Capture graphs for steps of decodes only. Called before the first step.

        Without `has_adapters`, the graphs are only for steps in which no row has an adapter.
        `report` gets the fraction done. An error that the backend raises reaches the caller, and
        steps of decodes then run without these graphs. For `shares_prefixes` see `DecodeGraphs`.
        """
        captured = self._captured(has_adapters=has_adapters)
        graphs = DecodeGraphs(self._model, *captured, shares_prefixes=shares_prefixes)
        graphs.capture(backend, report)
        self._decodes[has_adapters] = graphs

    def capture_pieces(
        self, backend: GraphBackend, report: Callable[[float], None], *, has_adapters: bool = False
    ) -> None:
        """Capture graphs as `capture_decodes` does, but for steps of few tokens."""
        pieces = PiecewiseGraphs(self._model.forward, *self._captured(has_adapters=has_adapters))
        pieces.capture(backend, report)
        self._pieces[has_adapters] = pieces

    def _captured(
        self, *, has_adapters: bool
    ) -> tuple[Any, Limits, torch.Tensor, AdapterSlots | None]:
        slots = self._slots if has_adapters else None
        return self._pool, self._limits, self._last_token_ids, slots

    def run(
        self, scheduled: ScheduledRows
    ) -> tuple[tuple[Sampled, ...], tuple[PromptScoresReadback, ...]]:
        """Compute a step's tokens, sample, and score prompts whose requests want scores.

        Returns:
            The samples and the prompt scores of each part of the step; a step that is not split has
            one part. Parts without samples are left out of the samples, and parts without scores
            out of the scores. On a GPU, the work is only enqueued.
        """
        results = self._run(scheduled)
        self._token_limit.count_step()
        return results

    def _run(
        self, scheduled: ScheduledRows
    ) -> tuple[tuple[Sampled, ...], tuple[PromptScoresReadback, ...]]:
        """Compute a step, or a part of a step, splitting it if it does not fit in memory."""
        is_graph = self._decode_graphs(scheduled) is not None
        if is_graph or self._token_limit.allows(scheduled.num_tokens):
            try:
                return self._run_at_once(scheduled)
            except torch.OutOfMemoryError as error:
                if not self._takes_parts or halves(scheduled) is None:
                    raise
                _log.warning(
                    "a step does not fit in memory: computing it in parts",
                    num_tokens=scheduled.num_tokens,
                    error=str(error),
                )
            metrics.OUT_OF_MEMORY.inc()
            self._token_limit.shrink(scheduled.num_tokens)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        if (parts := halves(scheduled)) is None:
            return self._run_at_once(scheduled)
        sampled: list[Sampled] = []
        scores: list[PromptScoresReadback] = []
        for part in parts:
            part_sampled, part_scores = self._run(part)
            sampled += map(_kept, part_sampled)
            scores += part_scores
        return tuple(sampled), tuple(scores)

    def _decode_graphs(self, scheduled: ScheduledRows) -> DecodeGraphs | None:
        """Return the graphs that can compute the whole step, if any."""
        graphs = self._of_adapters(self._decodes, scheduled)
        return graphs if graphs is not None and graphs.takes(scheduled) else None

    def _of_adapters(self, graphs: Mapping[bool, _G], scheduled: ScheduledRows) -> _G | None:
        """Return the graphs with adapters if a row has one, else the graphs without adapters.

        None: these graphs were not captured, or a row's adapter has no slot.
        """
        if not self._adapters:
            return graphs.get(False)
        numbers = self._rows.adapter[scheduled.rows]
        if not numbers.any():
            return graphs.get(False)
        return graphs.get(True) if self._slots is not None and self._slots.have(numbers) else None

    def _run_at_once(
        self, scheduled: ScheduledRows
    ) -> tuple[tuple[Sampled, ...], tuple[PromptScoresReadback, ...]]:
        prompt_scores = decoded = None
        if (decodes := self._decode_graphs(scheduled)) is not None:
            with timeline.span("replay"):
                decoded = decodes.replay(self._rows, scheduled, self._before_launch)
            hidden, sampling_rows = decoded.hidden, decoded.rows
        else:
            hidden, sampling_rows, prompt_scores = self._forward(scheduled)
        scores = () if prompt_scores is None else (prompt_scores,)
        if not len(scheduled.sampling):
            return (), scores
        return (self._sample(hidden, sampling_rows, scheduled, decoded),), scores

    def _forward(
        self, scheduled: ScheduledRows
    ) -> tuple[torch.Tensor, torch.Tensor, PromptScoresReadback | None]:
        """Compute a step without decode graphs.

        Returns:
            The hidden states to sample from, `[N, E]`; the row of each; and the prompt scores.
        """
        table = self._sampler.table
        is_scored = table.wants_prompt_logprobs[scheduled.rows].any()
        wants_all = is_scored or table.pools_all[scheduled.rows].any()
        pieces = self._of_adapters(self._pieces, scheduled)
        if pieces is not None and pieces.takes(scheduled):
            with timeline.span("replay"):
                replayed = pieces.replay(
                    self._rows,
                    scheduled,
                    self._before_launch,
                    is_all_known=self._is_all_known,
                )
            of_all, sampling_rows = replayed.hidden, replayed.sampling_rows
            hidden = of_all.index_select(0, replayed.places)
        else:
            with timeline.span("gather the inputs"):
                batch = build_input_batch(
                    self._rows,
                    scheduled,
                    self._last_token_ids,
                    self._limits.block_size,
                    is_all_known=self._is_all_known,
                    adapters=self._adapters,
                    slots=self._slots,
                )
            metadata = replace(batch.metadata, wanted=None) if wants_all else batch.metadata
            if wants_all and table.pooling:
                types = self._pooler.token_types(scheduled, self._device)
                metadata = replace(metadata, token_types=types)
            self._before_launch()
            with timeline.span("forward"):
                hidden = of_all = forward(self._model, batch, self._pool, metadata)
            if wants_all:
                hidden = batch.metadata.select(of_all)
            sampling_rows = batch.sampling_rows
        prompt_scores = None
        if is_scored:
            prompt_scores = score_prompts(of_all, self._rows, scheduled, table, self._model.logits)
        if wants_all:
            self._pooler.add(of_all, scheduled)
        return hidden, sampling_rows, prompt_scores

    def _sample(
        self,
        hidden: torch.Tensor,
        sampling_rows: torch.Tensor,
        scheduled: ScheduledRows,
        decoded: Decoded | None,
    ) -> Sampled:
        """Sample a token per sampling row, and keep the tokens on the device for the next step."""
        rows, positions = scheduled.rows[scheduled.sampling], scheduled.positions
        pools = self._sampler.table.pools[rows]
        if pools.any():
            sampled = sample_or_pool(
                pools,
                hidden,
                lambda part, places: self._draw(part, rows[places], positions[places]),
                lambda part, places: self._pooler.vectors(
                    part, places, rows[places], positions[places]
                ),
            )
        else:
            sampled = self._draw(hidden, rows, positions, decoded)
        if not self._is_all_known:
            self._last_token_ids.index_copy_(0, sampling_rows, sampled.token_ids)
        return sampled

    def _draw(
        self,
        hidden: torch.Tensor,
        rows: Int64Array,
        positions: Int64Array,
        decoded: Decoded | None = None,
    ) -> Sampled:
        with timeline.span("ask the grammars"):
            forced = self._sampler.forced(rows)
        if forced is None:
            return self._sample_from(hidden, rows, positions, decoded)
        return sample_others(
            forced,
            hidden,
            lambda part, places: self._sample_from(part, rows[places], positions[places]),
        )

    def _sample_from(
        self,
        hidden: torch.Tensor,
        rows: Int64Array,
        positions: Int64Array,
        decoded: Decoded | None = None,
    ) -> Sampled:
        num_outputs = positions - self._rows.num_prompt[rows]
        if decoded is None:
            with timeline.span("logits"):
                logits, likeliest = self._model.logits(hidden), None
        else:
            logits, likeliest = decoded.logits, decoded.likeliest
        with timeline.span("sample"):
            return self._sampler.sample(logits, rows, positions, num_outputs, likeliest)


def _kept(sampled: Sampled) -> Sampled:
    """Copy the samples of one part of a split step.

    The next part may replay the same CUDA graph, which would overwrite the samples.
    """
    token_ids, is_finite = sampled.token_ids.clone(), sampled.is_finite.clone()
    return replace(sampled, token_ids=token_ids, is_finite=is_finite)
