"""Serves requests with a real scheduler, and with an executor whose pool is too small for them.

Sequences are swapped out and in, forked sequences copy a shared block before they write to it, and
prompts find their beginning in the prefix cache.
"""

import random
from collections import Counter
from dataclasses import replace

import numpy as np

from contract.sampling import SamplingParams
from contract.worker_limits import Limits
from gpu_worker.step.executor import Executor
from scheduler_svc.core.interface.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler

_NUM_SHARED = 24
"""The number of tokens with which half of the prompts begin alike."""


def serve(
    executor: Executor, limits: Limits, num_requests: int, num_tokens: int
) -> tuple[list[list[int]], Counter[str]]:
    """Return the tokens of all outputs, and how many blocks were swapped and copied."""
    chance = random.Random(0)
    core = Scheduler(
        SchedulerConfig(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            num_host_blocks=limits.num_host_blocks,
            preemption_mode=PreemptionMode.SWAP,
            watermark=0.0,
        )
    )
    waiting = [_request(chance, number, num_tokens) for number in range(num_requests)]
    samplings = {
        request.sampling: SamplingParams(
            seed=number, temperature=float(number % 2), ignore_eos=True
        )
        for number, request in enumerate(waiting)
    }
    outputs: dict[tuple[bytes, int], list[int]] = {}
    of_row: dict[int, tuple[bytes, int]] = {}
    seen: Counter[str] = Counter(swapped_out=0, swapped_in=0, copied=0)
    now = 0.0
    executor.reset()
    while waiting or list(core.live):
        now += 1.0
        if waiting:
            core.submit(waiting.pop(0), now)
        plan = core.schedule(now)
        if plan is None:
            continue
        for new in plan.new_sequences:
            assert isinstance(new.sampling, bytes)
            of_row[new.row] = new.sampling, new.output_index
        seen["swapped_out"] += len(plan.swap_out_src_block_ids)
        seen["swapped_in"] += len(plan.swap_in_src_block_ids)
        seen["copied"] += len(plan.copy_src_block_ids)
        parsed = tuple(replace(n, sampling=samplings[n.sampling]) for n in plan.new_sequences)
        result = executor.step(replace(plan, new_sequences=parsed))
        for row, token in zip(result.sampled_rows, result.sampled_token_ids, strict=True):
            outputs.setdefault(of_row[int(row)], []).append(int(token))
        core.update(replace(result, execute_s=0.0))  # the speed must not change the plans
    executor.reset()
    return [outputs[key] for key in sorted(outputs)], seen


def _request(chance: random.Random, number: int, num_tokens: int) -> Request:
    shared = range(2, 2 + _NUM_SHARED) if number % 2 else ()
    prompt = [*shared, *(chance.randrange(2, 900) for _ in range(chance.randrange(1, 60)))]
    return Request(
        SourceId(0),
        SeqKey(number * 10),
        "",
        np.array(prompt, np.int32),
        1 + number % 3,
        num_tokens,
        str(number).encode(),
    )
