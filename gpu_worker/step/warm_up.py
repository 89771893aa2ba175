"""Executes every kind of step once before the worker serves.

Triton compiles a kernel when it is first launched with new types, options or strides. Compiling
takes seconds, during which all streams would stall. So a worker on a GPU launches each variant of
each kernel at start; `tests/kernels/test_compile_keys.py` checks that random steps afterwards need
no other variant.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import structlog

from contract.arrays import ints
from contract.sampling import SamplingParams, StructuredOutput
from contract.step import NewSequence, Plan, StepId
from contract.worker_limits import Limits
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.step.executor import Executor

_log = structlog.get_logger()

# One kind of sampling for each set of kernels.
_GREEDY = SamplingParams(seed=0, temperature=0.0, ignore_eos=True)
_DRAWN = SamplingParams(seed=0, temperature=1.0, ignore_eos=True)
_CUT = SamplingParams(seed=0, temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, ignore_eos=True)
_COUNTED = SamplingParams(
    seed=0,
    temperature=1.0,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    min_tokens=4,
    logprobs=2,
    prompt_logprobs=2,
    ignore_eos=True,
)
_IN_A_FORM = SamplingParams(
    seed=0, temperature=1.0, structured=StructuredOutput(grammar="start: /[0-9]+/")
)
_PROMPT_TOKENS = 4
_NUM_DECODES = 3
"""`_one_then_two` plans at most this many decodes for a row."""
_SEQS_OF_ONE_VARIANT = 256
"""The decode kernel has one variant for at most this number of sequences, and another for each
power of two above this number."""


def warm_up(
    executor: Executor,
    limits: Limits,
    *,
    has_structured_output: bool,
    num_draft_tokens: int = 0,
    ranks: Ranks | None = None,
) -> None:
    """Execute every kind of step; all rows are free before and after. KV contents are lost.

    All ranks must call this function. Ranks communicate within a step, so they must execute the
    same steps. So if `has_structured_output` is true on any rank, all ranks execute the steps with
    grammars, although only rank 0 applies the grammars.

    If the limits are too small for these steps, none is executed, and the first requests wait for
    the compilation of kernels.
    """
    most_tokens = _PROMPT_TOKENS + (_NUM_DECODES + 1) * (1 + num_draft_tokens)
    most_at_once = _PROMPT_TOKENS + 1 + num_draft_tokens
    if limits.max_model_len < most_tokens or limits.max_num_batched_tokens < most_at_once:
        return
    kinds = [_GREEDY, _DRAWN, _CUT, _COUNTED]
    if ranks is not None:
        has_structured_output = bool(ranks.any_has(np.array([has_structured_output])).all())
    if has_structured_output:
        kinds.append(_IN_A_FORM)
    executor.reset()
    num_failed = 0
    with executor.rehearsal():
        for plans in _rehearsals(limits, most_tokens, kinds, num_draft_tokens):
            num_failed += _run(executor, plans)
    if num_failed:
        _log.warning(
            "rows of the warm-up ended early, because their logits were not finite: kernels that"
            " they did not launch are compiled while serving",
            num_rows=num_failed,
        )


def _rehearsals(
    limits: Limits, most_tokens: int, kinds: Sequence[SamplingParams], num_draft_tokens: int
) -> Iterator[Iterator[Plan]]:
    """Yield a series of plans for each kind of step. Each series begins with free rows."""
    for adapter in range(len(limits.adapters) + 1):
        for kind in kinds:
            yield _one_then_two(limits, most_tokens, kind, kind, adapter)
            yield _one_then_two(limits, most_tokens, _GREEDY, kind, adapter)
    yield _moves(limits)
    yield _behind_many(limits, num_draft_tokens)
    num_seqs = _SEQS_OF_ONE_VARIANT
    while num_seqs < limits.max_num_seqs:
        num_seqs *= 2
        yield _many(limits, min(num_seqs, limits.max_num_seqs))


def _run(executor: Executor, plans: Iterator[Plan]) -> int:
    """Execute the plans and free all rows; return how many rows had non-finite logits."""
    num_failed = 0
    for plan in plans:
        # A row may have ended: by an end token, or by logits that are not finite.
        num_decodes = int(executor.rows.is_decoding.sum())
        num_failed += len(executor.step(replace(plan, num_decodes=num_decodes)).failed_rows)
    executor.reset()
    return num_failed


def _one_then_two(
    limits: Limits, most_tokens: int, first: SamplingParams, second: SamplingParams, adapter: int
) -> Iterator[Plan]:
    """Plan a prompt in two chunks, a decode, a second prompt beside a decode, and two decodes."""
    num_first = _PROMPT_TOKENS // 2
    new = [
        _new(limits, row, sampling, adapter, _PROMPT_TOKENS, most_tokens)
        for row, sampling in enumerate((first, second))
    ]
    yield _plan(1, new[0], chunk_rows=[0], chunk_lens=[num_first])
    yield _plan(2, chunk_rows=[0], chunk_lens=[_PROMPT_TOKENS - num_first])
    yield _plan(3)
    if limits.max_num_seqs == 1:
        return
    yield _plan(4, new[1], chunk_rows=[1], chunk_lens=[_PROMPT_TOKENS])
    yield _plan(5)


def _behind_many(limits: Limits, num_draft_tokens: int) -> Iterator[Plan]:
    """Plan decodes behind a prompt that is so long that attention splits its context.

    Only the last chunk of the prompt is computed. Without guesses, one decode follows. With
    guesses, more decodes follow, because a draft model computes the whole prompt in several steps,
    and until then the row gets no guesses.
    """
    num_steps = 1
    if num_draft_tokens:
        num_steps += -(-limits.max_model_len // limits.max_num_batched_tokens)
    num_sampled = num_steps + 1 + num_draft_tokens  # by the chunk and the decodes, at most
    num_tokens = limits.max_model_len - num_sampled
    if num_tokens < _PROMPT_TOKENS:
        return
    new = _new(limits, 0, _GREEDY, 0, num_tokens, limits.max_model_len)
    yield _plan(
        1,
        replace(new, num_computed_tokens=num_tokens - _PROMPT_TOKENS),
        chunk_rows=[0],
        chunk_lens=[_PROMPT_TOKENS],
    )
    for step_id in range(2, 2 + num_steps):
        yield _plan(step_id)


def _moves(limits: Limits) -> Iterator[Plan]:
    """Plan block copies, and swaps if there is a host tier; first of one block, then of two."""
    for num in (1, 2):
        ids, others = range(num), range(num, 2 * num)
        if 2 * num <= limits.num_blocks:
            yield _plan(3 * num, copy_src_block_ids=ids, copy_dst_block_ids=others)
        if num <= min(limits.num_blocks, limits.num_host_blocks):
            yield _plan(3 * num + 1, swap_out_src_block_ids=ids, swap_out_dst_block_ids=ids)
            yield _plan(3 * num + 2, swap_in_src_block_ids=ids, swap_in_dst_block_ids=ids)


def _many(limits: Limits, num_seqs: int) -> Iterator[Plan]:
    """Plan prompts of one token, their decodes, and another prompt beside the decodes."""
    rows = list(range(num_seqs - 1))
    new = [_new(limits, row, _GREEDY, 0, 1, _PROMPT_TOKENS) for row in (*rows, num_seqs - 1)]
    yield _plan(1, *new[:-1], chunk_rows=rows, chunk_lens=[1] * len(rows))
    yield _plan(2)
    yield _plan(3, new[-1], chunk_rows=[num_seqs - 1], chunk_lens=[1])


def _new(
    limits: Limits,
    row: int,
    sampling: SamplingParams,
    adapter: int,
    num_tokens: int,
    most_tokens: int,
) -> NewSequence:
    """Make a sequence. Sequences may have the same blocks, because their KV does not matter."""
    num_blocks = -(-most_tokens // limits.block_size) * len(limits.kv_windows)
    return NewSequence(
        seq_id=row,
        row=row,
        token_ids=np.zeros(num_tokens, np.int32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_ids=np.arange(num_blocks, dtype=np.int32) % limits.num_blocks,
        sampling=sampling,
        max_total_tokens=most_tokens,
        adapter=adapter,
    )


def _plan(step_id: int, *new: NewSequence, **arrays: Sequence[int]) -> Plan:
    """Make a plan without `num_decodes`, which `_run` fills in."""
    named: dict[str, Any] = {name: ints(values) for name, values in arrays.items()}
    return Plan(StepId(step_id), 0, new_sequences=new, **named)
