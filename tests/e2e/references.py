"""Reference outputs of `transformers`, in fp32 and greedy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NUM_TOKENS = 128


@dataclass(frozen=True)
class Search:
    """A beam search, with the parameters of `transformers`."""

    prompt: tuple[int, ...]
    width: int
    n: int
    num_tokens: int
    ends: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    min_tokens: int = 0


def searched_tokens(model_dir: Path, searches: Sequence[Search]) -> list[list[list[int]]]:
    """The `n` outputs of each search, best first."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return [_search(model, search) for search in searches]
    finally:
        torch.set_num_threads(threads)


def _search(model: Any, search: Search) -> list[list[int]]:
    prompt = torch.tensor([search.prompt])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        num_beams=search.width,
        num_return_sequences=search.n,
        max_new_tokens=search.num_tokens,
        min_new_tokens=search.min_tokens or None,
        eos_token_id=list(search.ends) or None,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        do_sample=False,
        pad_token_id=0,
    )
    return [_until_end(row[len(search.prompt) :].tolist(), search.ends) for row in output]


def _until_end(token_ids: list[int], ends: Sequence[int]) -> list[int]:
    for length, token_id in enumerate(token_ids, start=1):
        if token_id in ends:
            return token_ids[:length]
    return token_ids


def greedy_tokens(
    model_dir: Path, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS
) -> list[list[int]]:
    """The next tokens of each prompt; they continue after the model's end token."""
    # Imported here and not above, because it takes seconds, and few test runs need it.
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model.generation_config.eos_token_id = None  # otherwise outputs would end there
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            output = model.generate(
                padded,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
    finally:
        torch.set_num_threads(threads)
    return [row[longest:].tolist() for row in output]
