"""A model with two adapters, behind an executor that generates greedy tokens."""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import torch

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layout import kv_dtypes
from gpu_worker.lora.adapter_files import load_adapter
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.models.registry import open_model
from gpu_worker.step.executor import Executor
from tests.lora_fixture import make_adapter, merge
from tests.unit.gpu_worker.models.paged_loop import CPU, random_prompt

BLOCK_SIZE, NUM_TOKENS, CHUNK = 8, 64, 16
LIMITS = Limits(
    max_num_seqs=6,
    max_model_len=160,
    max_num_batched_tokens=128,
    num_blocks=120,
    block_size=BLOCK_SIZE,
    vocab_size=500,
)
PROMPTS = [random_prompt(length, seed=length) for length in (21, 40, 3, 33)]


SOME_TARGETS = ("v_proj", "up_proj", "o_proj", "c_fc", "dense", "dense_h_to_4h")


@dataclass(frozen=True)
class Case:
    """A model, two adapters, and the merged checkpoint for each adapter's number."""

    model: object
    merged: tuple


def make_case(model, root):
    make_adapter(root / "a", model, seed=1)
    make_adapter(root / "b", model, 2, rank=3, alpha=5, targets=SOME_TARGETS)
    merged = tuple(merge(root / f"merged-{name}", model, root / name) for name in "ab")
    return Case(model, (model, *merged))


class Worker:
    """An executor over a pool whose blocks are allocated in order; prompt i is in row i."""

    def __init__(
        self,
        case,
        dtype=torch.float32,
        quantization=None,
        drafter=None,
        kv_cache_dtype="auto",
        *,
        has_slots=False,
    ):
        source = open_model(case.model, "", quantization)
        root = case.merged[1].parent
        loaded = [load_adapter(name, root / name, source.config, dtype, CPU) for name in "ab"]
        adapters = dict(enumerate(loaded, start=1))
        self.executor = Executor(
            source.load(dtype, CPU, lambda _: None),
            KvPool(
                source.config,
                LIMITS.num_blocks,
                BLOCK_SIZE,
                kv_dtypes(kv_cache_dtype, set(), dtype, source.config.num_layers),
                CPU,
            ),
            replace(LIMITS, adapters={adapter.id: n for n, adapter in adapters.items()}),
            (),
            CPU,
            adapters=adapters,
            drafter=drafter,
            slots=AdapterSlots(source.config, CPU) if has_slots else None,
        )

    @torch.inference_mode()
    def generate(self, prompts, numbers, starts=None, before_step=lambda _: None):
        """The tokens of each prompt under the adapter of its number, and their logprobs."""
        starts = starts or [0] * len(prompts)
        left = [len(prompt) for prompt in prompts]
        tokens, logprobs = defaultdict(list), defaultdict(list)
        num_blocks = -(-LIMITS.max_model_len // BLOCK_SIZE)
        released, step_id = [], 0
        while len(released) < len(prompts):
            step_id += 1
            before_step(step_id)
            new = [i for i, start in enumerate(starts) if start == step_id - 1]
            chunks = [i for i, n in enumerate(left) if n and starts[i] < step_id]
            lens = [min(left[i], CHUNK) for i in chunks]
            done = [i for i in tokens if len(tokens[i]) >= NUM_TOKENS and i not in released]
            released += done
            decoding = [i for i in tokens if i not in released]
            result = self.executor.step(
                Plan(
                    step_id,
                    len(decoding),
                    released_rows=np.array(done, np.int32),
                    new_sequences=tuple(
                        NewSequence(
                            seq_id=i,
                            row=i,
                            token_ids=np.array(prompts[i], np.int32),
                            num_prompt_tokens=len(prompts[i]),
                            num_computed_tokens=0,
                            block_ids=np.arange(i * num_blocks, (i + 1) * num_blocks).astype("i4"),
                            sampling=SamplingParams(seed=0, temperature=0, logprobs=0),
                            max_total_tokens=LIMITS.max_model_len,
                            adapter=numbers[i],
                        )
                        for i in new
                    ),
                    chunk_rows=np.array(chunks, np.int32),
                    chunk_lens=np.array(lens, np.int32),
                )
            )
            for i, n in zip(chunks, lens, strict=True):
                left[i] -= n
            rows = result.sampled_rows.tolist()
            for row, token in zip(rows, result.sampled_token_ids.tolist(), strict=True):
                tokens[row].append(token)
            for logprob in result.logprobs:
                logprobs[rows[logprob.index]].append(logprob.logprob)
        return [(tokens[i][:NUM_TOKENS], logprobs[i][:NUM_TOKENS]) for i in range(len(prompts))]


def token_lists(results):
    return [tokens for tokens, _ in results]
