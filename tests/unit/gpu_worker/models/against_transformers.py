"""Compares a sequence's tokens with the greedy output of `transformers` in fp32."""

import functools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.unit.gpu_worker.models.paged_loop import Sequence

NUM_TOKENS = 128


@functools.lru_cache(maxsize=8)
def _reference(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def assert_equals_transformers(directory: Path, sequence: Sequence) -> None:
    """Fail unless transformers finds every token the likeliest after those before it.

    Such tokens equal its greedy output. One forward pass checks all of them, and compares the
    logits of every position, too.
    """
    logits = assert_greedy(directory, sequence.prompt, sequence.output)
    torch.testing.assert_close(torch.stack(sequence.logits), logits, rtol=0, atol=1e-4)


@torch.inference_mode()
def assert_greedy(directory: Path, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Fail unless transformers draws `output` greedily; returns the logits, `[T - 1, V]`."""
    token_ids = torch.tensor([prompt + output[:-1]])
    logits = _reference(directory)(token_ids, use_cache=False).logits[0]
    assert output == logits[len(prompt) - 1 :].argmax(-1).tolist()
    return logits


@torch.inference_mode()
def greedy_continuation(directory: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """The output of transformers, without stopping at the model's end token."""
    output = _reference(directory).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
