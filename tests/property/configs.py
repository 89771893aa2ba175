"""Configurations of the cores in histories: tiny ones, in which everything happens soon."""

from hypothesis import strategies as st

from contract.worker_limits import STATE_WINDOW, Chunk
from scheduler_svc.core.interface.config import Eviction, PreemptionMode, SchedulerConfig

POLICIES = st.sampled_from(
    ["fcfs", "priority", "fair", "deadline", "fair+deadline", "priority+fair+deadline"]
)
CHOICES = {
    "num_blocks": st.integers(2, 12),
    "block_size": st.integers(1, 4),
    "kv_windows": st.sampled_from(
        [
            *[(None,), (None,), (4,), (7,), (None, 5), (None, 3, 3), (None, 2), (None, 4, 2, 2)],
            *[(2,), (Chunk(4),), (None, Chunk(6)), (None, Chunk(8), 5)],
        ]
    ),
    "max_num_seqs": st.integers(1, 4),
    "extra_budget": st.integers(0, 6),
    "caching": st.booleans(),
    "chunk": st.none() | st.integers(1, 3),
    "watermark": st.sampled_from([0.0, 0.2]),
    "num_host_blocks": st.integers(0, 8),
    "num_disk_blocks": st.integers(0, 12),
    "max_disk_moves": st.integers(1, 4),
    "mode": st.sampled_from(PreemptionMode),
    "max_swap_blocks": st.integers(1, 3),
    "policy": POLICIES,
    "long_prefill": st.none() | st.integers(0, 4),
    "max_long_prefills": st.integers(1, 2),
    "eviction": st.sampled_from(Eviction),
    "pinned_share": st.sampled_from([0.25, 1.0]),
    "defragment_s": st.integers(0, 2),
    "max_moves": st.integers(1, 4),
    "num_draft_tokens": st.sampled_from([0, 0, 1, 3]),
    "num_more_blocks": st.none() | st.integers(0, 12),
}
"""The arguments of `tiny_config` for each kind of core."""


def tiny_config(
    *,
    num_blocks,
    block_size,
    kv_windows,
    max_num_seqs,
    extra_budget,
    caching,
    chunk,
    watermark,
    num_host_blocks,
    num_disk_blocks,
    max_disk_moves,
    mode,
    max_swap_blocks,
    policy,
    long_prefill,
    max_long_prefills,
    eviction,
    pinned_share,
    defragment_s,
    max_moves,
    num_draft_tokens,
    num_more_blocks,
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks * len(kv_windows) + (kv_windows != (None,)),
        block_size=block_size,
        kv_windows=kv_windows,
        min_num_blocks=min(num_blocks, -(-24 // block_size)),
        max_num_blocks=(
            None if num_more_blocks is None else num_blocks * len(kv_windows) + 1 + num_more_blocks
        ),
        max_num_seqs=max_num_seqs,
        num_draft_tokens=0 if STATE_WINDOW in kv_windows else min(num_draft_tokens, block_size - 1),
        max_num_batched_tokens=max_num_seqs + extra_budget,
        max_model_len=24,
        max_waiting=8,
        enable_prefix_caching=caching,
        watermark=watermark,
        max_prefill_chunk=chunk,
        num_host_blocks=num_host_blocks,
        num_disk_blocks=num_disk_blocks if num_host_blocks else 0,
        disk_bytes_per_s=6.0,
        max_disk_moves=max_disk_moves,
        bytes_per_block=block_size,
        # At these rates a block swaps faster than it is computed if two thirds of it are used.
        swap_bytes_per_s=6.0,
        prefill_tokens_per_s=2.0,
        preemption_mode=mode,
        max_swap_blocks=max_swap_blocks,
        long_prefill_threshold=long_prefill,
        max_long_prefills=max_long_prefills,
        eviction=eviction,
        max_pinned_share=pinned_share,
        max_tenant_pinned_share=0.25,
        defragment_interval_s=defragment_s,
        claim_s=3.0,
        defragment_threshold=0.0,
        max_defragment_moves=max_moves,
        policy=policy,
        policy_args=(("aging_s", "3"),) if "priority" in policy else (),
    )
