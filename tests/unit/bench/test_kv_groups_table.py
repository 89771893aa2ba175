"""The table of a sequence's KV equals a worker's memory and a scheduler's blocks."""

import pytest
import torch
from kv.groups import MODELS, NUM_TOKENS, held, vllm_bytes

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layout import group_attention, place_states
from tests.unit.scheduler_svc.core.core_driver import answer, make_core, schedule, submit

CPU, DTYPE, MIB = torch.device("cpu"), torch.bfloat16, 2**20


@pytest.mark.parametrize(
    "name",
    [
        "Llama 3.1 8B",
        "Gemma 3 1B",
        "Gemma 4 E2B",
        "Gemma 4 31B",
        "DeepSeek V3, Kimi K2",
        "LFM2-1.2B",
        "Mamba 2.8B",
    ],
)
def test_a_row_is_what_worker_and_scheduler_take(name):
    config, row = MODELS[name], held(MODELS[name])
    groups, block_size = group_attention(config, DTYPE, 2**20), 16
    if config.num_states:
        groups, block_size = place_states(config, block_size, DTYPE, groups)
    pool = KvPool(config, 2, block_size, DTYPE, CPU, groups=groups)
    core = make_core(
        num_blocks=row.num_blocks + 200 * len(groups.windows),
        block_size=block_size,
        kv_windows=groups.windows,
        max_num_batched_tokens=2048,
        max_model_len=2 * NUM_TOKENS,
        enable_prefix_caching=False,
    )
    num_free = core.pool.num_available
    submit(core, 0, [0] * (NUM_TOKENS - 40), max_tokens=100)
    while (plan := schedule(core)) is not None:
        answer(core, plan, *([] if core.running.prefilling else [0]))
        (seq,) = core.running
        if core.running.num_computed_tokens(seq) == NUM_TOKENS:
            break
    num_held = num_free - core.pool.num_available
    assert pool.blocks_as_bytes.nbytes == 2 * row.bytes_per_block
    # A decode gives a group's block back when it takes the next one.
    assert 0 <= num_held - row.num_blocks <= len(groups.windows)


def test_rows_are_close_to_vllm_s_rule():
    for name, config in MODELS.items():
        # All blocks have one size, which an odd number of layers of twice the size does not fill.
        most = 1.14 if name == "Gemma 4 26B-A4B" else 1.07
        assert held(config).num_bytes <= most * vllm_bytes(config), name


def test_deepseek_s_cache_is_the_latent():
    latents = 61 * 576 * 2 * NUM_TOKENS
    assert held(MODELS["DeepSeek V3, Kimi K2"]).num_bytes <= 1.1 * latents
