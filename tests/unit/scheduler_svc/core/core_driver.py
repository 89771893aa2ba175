"""Drives a scheduler core by hand, and reads its plans."""

import numpy as np

from contract.step import Plan, Result
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.events import StepEvents
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.invariants import check
from scheduler_svc.core.scheduler import Scheduler

ROUTER = SourceId(0)


def make_core(num_blocks: int = 16, **overrides) -> Scheduler:
    settings = {
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "watermark": 0.0,
    }
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, **(settings | overrides)))


def submit(
    core: Scheduler, key: int, prompt, *, max_tokens: int = 8, n: int = 1, salt: str = "", **fields
):
    request = Request(
        source=ROUTER,
        first_seq_key=SeqKey(key),
        request_id=f"request-{key}",
        prompt_token_ids=np.array(prompt, np.int32),
        n=n,
        max_tokens=max_tokens,
        sampling=b"",
        cache_salt=salt,
        **fields,
    )
    core.submit(request, now=float(key))
    check(core)


def schedule(core: Scheduler, now: float = 0.0) -> Plan:
    plan = core.schedule(now)
    assert plan is not None
    check(core)
    return plan


def answer(
    core: Scheduler, plan: Plan, *rows: int, stopped=(), failed=(), failed_blocks=(), **disk
) -> StepEvents:
    """Each of `rows` samples token 7; `disk` has the fields of a result's ended disk moves."""
    outcome = Result(
        plan.step_id,
        np.array(rows, np.int32),
        np.full(len(rows), 7, np.int32),
        np.array(stopped, np.int32),
        np.array(failed, np.int32),
        failed_swap_in_block_ids=np.array(failed_blocks, np.int32),
        **{name: np.array([*blocks], np.int32) for name, blocks in disk.items()},
    )
    news = core.update(outcome)
    check(core)
    return news


def new(plan: Plan):
    """(row, computed tokens, block ids) of each new sequence."""
    return [(s.row, s.num_computed_tokens, s.block_ids.tolist()) for s in plan.new_sequences]


def chunks(plan: Plan) -> dict[int, int]:
    return dict(zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True))


def grown(plan: Plan) -> dict[int, int]:
    return dict(zip(plan.appended_rows.tolist(), plan.appended_block_ids.tolist(), strict=True))


def stores(plan: Plan) -> dict[int, int]:
    """A plan's stores: host block to disk block."""
    sources, targets = plan.disk_store_src_block_ids, plan.disk_store_dst_block_ids
    return dict(zip(sources.tolist(), targets.tolist(), strict=True))


def loads(plan: Plan) -> dict[int, int]:
    """A plan's loads: disk block to host block."""
    sources, targets = plan.disk_load_src_block_ids, plan.disk_load_dst_block_ids
    return dict(zip(sources.tolist(), targets.tolist(), strict=True))


def outs(plan: Plan) -> dict[int, int]:
    """A plan's swap-outs: device block to host block."""
    sources, targets = plan.swap_out_src_block_ids, plan.swap_out_dst_block_ids
    return dict(zip(sources.tolist(), targets.tolist(), strict=True))


def ins(plan: Plan) -> dict[int, int]:
    """A plan's swap-ins: host block to device block."""
    sources, targets = plan.swap_in_src_block_ids, plan.swap_in_dst_block_ids
    return dict(zip(sources.tolist(), targets.tolist(), strict=True))


def run_to_disk(core, key):
    """Run the prompt [key + 1] * 9 to its end, so that its two full blocks are cached; return the
    first plan."""
    submit(core, key, [key + 1] * 9, max_tokens=1)
    first = schedule(core)
    answer(core, first, 0)
    second = schedule(core)
    answer(core, second, stored_disk_block_ids=stores(first).values())
    return first
