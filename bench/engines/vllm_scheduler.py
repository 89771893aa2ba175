"""Times vLLM's scheduler as `scheduler.py` times ours, in an interpreter that has vLLM.

Answers each input line `[running, steps]` with the microseconds per step, and a line `"hash"` with
the microseconds per block of 16 tokens. The scheduler has vLLM's defaults: asynchronous scheduling,
prefix caching, sha256.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
MODEL = {  # only the shape of this config matters
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 32_000,
    "max_position_embeddings": 131_072,
}


def make_scheduler(model: Path, num_seqs: int, max_len: int) -> AsyncScheduler:
    """Make a scheduler with room for all sequences, configured as ours in `scheduler.py`."""
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=max_len
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(num_seqs, 8192),
            max_model_len=max_len,
            is_encoder_decoder=False,
            async_scheduling=True,
        ),
        device_config=DeviceConfig("cpu"),
    )
    num_blocks = cache.num_gpu_blocks = num_seqs * (max_len // BLOCK_SIZE + 2) + 1
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    kv = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return AsyncScheduler(config, kv, StructuredOutputManager(config), BLOCK_SIZE)


def step_us(model: Path, num_seqs: int, num_steps: int) -> float:
    """Return the median microseconds of a step in which `num_seqs` requests decode.

    Their lengths are spread over a block, so equally many need a new block in each step.
    """
    max_len = 256 + num_steps + 2 * BLOCK_SIZE
    scheduler = make_scheduler(model, num_seqs, max_len)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    rng = np.random.default_rng(0)
    for key in range(num_seqs):
        prompt = rng.integers(0, 32_000, 128 + key % BLOCK_SIZE).tolist()
        params = SamplingParams(max_tokens=max_len - len(prompt), ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=0)
        scheduler.add_request(Request(str(key), prompt, params, None, block_hasher=hasher))
    costs_s: list[float] = []
    num_decoding = 0
    while len(costs_s) < num_steps:
        start = time.thread_time()
        plan = scheduler.schedule()
        scheduled = time.thread_time()
        names = list(plan.num_scheduled_tokens)
        sampled = [[] if scheduler.requests[n].is_prefill_chunk else [1] for n in names]
        outcome = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled)
        executed = time.thread_time()
        scheduler.update_from_output(plan, outcome)
        if num_decoding == num_seqs:
            costs_s.append(time.thread_time() - executed + scheduled - start)
        num_decoding = sum(map(bool, sampled))
    return statistics.median(costs_s) * 1e6


def hash_us_per_block(num_blocks: int = 512) -> float:
    """Return the microseconds per block of hashing a prompt: the least of 50 prompts."""
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    rng, costs_s = np.random.default_rng(0), []
    for key in range(50):
        prompt = rng.integers(0, 32_000, num_blocks * BLOCK_SIZE).tolist()
        request = Request(str(key), prompt, SamplingParams(), None)
        start = time.thread_time()
        assert len(hasher(request)) == num_blocks
        costs_s.append(time.thread_time() - start)
    return min(costs_s) / num_blocks * 1e6


def main() -> None:
    """Answer the lines of standard input; vLLM's own output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        for line in sys.stdin:
            question = json.loads(line)
            cost = hash_us_per_block() if question == "hash" else step_us(model, *question)
            print(json.dumps(cost), file=answers)


if __name__ == "__main__":
    main()
