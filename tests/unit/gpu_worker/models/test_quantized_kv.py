"""Models with quantized KV: close to those with plain KV, and unchanged by a swap."""

import numpy as np
import pytest
import torch

from gpu_worker.kv.host_pool import HostPool
from gpu_worker.models.registry import open_model
from tests.unit.gpu_worker.models.paged_loop import (
    CPU,
    PagedLoop,
    Sequence,
    load,
    random_prompt,
)

NUM_TOKENS = 24
FAMILIES = ["llama", "mistral", "gpt_neox", "gpt2"]  # the last runs in transformers
every_dtype = pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])


def paged_loop(model_dirs, family, kv_cache_dtype, **options):
    directory = model_dirs.get(family)
    source = open_model(directory)
    model = source.load(torch.float32, CPU, lambda _: None)
    return PagedLoop(
        model, block_size=8, config=source.config, kv_cache_dtype=kv_cache_dtype, **options
    )


def distance(sequence, other):
    """The relative distance of the logits over the same prompt."""
    ours, theirs = (torch.stack(s.logits[: len(s.prompt)]) for s in (sequence, other))
    return float((ours - theirs).norm() / theirs.norm())


@every_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_those_over_plain_kv(model_dirs, family, kv_cache_dtype):
    prompt = random_prompt(41, seed=1)
    plain, quantized, skipping = Sequence(prompt), Sequence(prompt), Sequence(prompt)
    paged_loop(model_dirs, family, "auto").generate([plain], 1)
    paged_loop(model_dirs, family, kv_cache_dtype).generate([quantized], NUM_TOKENS)
    paged_loop(model_dirs, family, kv_cache_dtype, skip_layers={1}).generate([skipping], 1)
    assert len(quantized.output) == NUM_TOKENS
    # Random weights amplify errors; a trained model's are a thousandth (bench/quality.py).
    bound = {"int8": 0.04, "fp8": 0.16}[kv_cache_dtype]
    assert 0 < distance(skipping, plain) < bound
    assert 0 < distance(quantized, plain) < bound
    assert distance(skipping, quantized) > 0, "a layer was skipped"


@every_dtype
def test_skipping_all_layers_is_plain_kv(model_dirs, kv_cache_dtype):
    prompt = random_prompt(20, seed=2)
    plain, skipping = Sequence(prompt), Sequence(prompt)
    paged_loop(model_dirs, "llama", "auto").generate([plain], 8)
    loop = paged_loop(model_dirs, "llama", kv_cache_dtype, skip_layers={0, 1})
    loop.generate([skipping], 8)
    assert torch.equal(torch.stack(plain.logits), torch.stack(skipping.logits))


@every_dtype
@pytest.mark.parametrize("plain_layer", [0, 1])
def test_a_model_in_bfloat16_may_have_one_plain_layer(model_dirs, kv_cache_dtype, plain_layer):
    """It runs as one native program where the C library is compiled."""
    model = load(model_dirs.get("qwen3", dtype="bfloat16"), torch.bfloat16)
    prompt = random_prompt(41, seed=1)
    plain, mixed = Sequence(prompt), Sequence(prompt)
    PagedLoop(model, 8).generate([plain], 1)
    loop = PagedLoop(model, 8, kv_cache_dtype=kv_cache_dtype, skip_layers={plain_layer})
    loop.generate([mixed], NUM_TOKENS)
    assert 0 < distance(mixed, plain) < 0.2


@every_dtype
def test_a_sequence_has_the_same_bits_alone_in_company_and_in_chunks_of_64(
    model_dirs, kv_cache_dtype
):
    model = load(model_dirs.get("llama"))
    prompts = [random_prompt(length, seed=length) for length in (128, 5, 70)]
    together = [Sequence(prompt) for prompt in prompts]
    loop = PagedLoop(model, 16, kv_cache_dtype=kv_cache_dtype)
    loop.generate(together, NUM_TOKENS, chunk_len=64)
    for prompt, sequence in zip(prompts, together, strict=True):
        alone = Sequence(prompt)
        loop = PagedLoop(model, 16, kv_cache_dtype=kv_cache_dtype)
        loop.generate([alone], NUM_TOKENS, chunk_len=128)
        assert alone.output == sequence.output
        assert torch.allclose(torch.stack(alone.logits), torch.stack(sequence.logits), atol=1e-5)


@every_dtype
def test_a_swap_changes_no_bit(model_dirs, kv_cache_dtype):
    model = load(model_dirs.get("qwen3"))
    prompt = random_prompt(21, seed=3)
    stayed, moved = Sequence(prompt), Sequence(prompt)
    PagedLoop(model, 8, kv_cache_dtype=kv_cache_dtype).generate([stayed], NUM_TOKENS)

    loop = PagedLoop(model, 8, kv_cache_dtype=kv_cache_dtype)
    moved.block_table = list(range(6))
    host = HostPool(loop.pool.blocks_as_bytes, 6)
    with torch.inference_mode():
        while len(moved.output) < NUM_TOKENS:
            loop._step([moved], 16)
            if len(moved.output) == NUM_TOKENS // 2:
                there = np.array(moved.block_table, np.int32)
                host.swap_out(there, np.arange(6, dtype=np.int32))
                loop.pool.blocks_as_bytes.fill_(0xAA)
                moved.block_table = [40, 3, 77, 12, 9, 100]
                host.swap_in(np.arange(6, dtype=np.int32), np.array(moved.block_table, np.int32))
                host.begin_step()
    assert torch.equal(torch.stack(moved.logits), torch.stack(stayed.logits))
