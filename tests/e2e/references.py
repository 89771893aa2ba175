"""What `transformers` generates, in fp32 and greedily: what the service must equal."""

from collections.abc import Sequence
from pathlib import Path

import torch

NUM_TOKENS = 128


def greedy_tokens(
    model_dir: Path, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS
) -> list[list[int]]:
    """The next tokens of each prompt, past the model's end token if it comes."""
    # Here, not above: importing a model takes seconds, and not every session runs this.
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model.generation_config.eos_token_id = None  # or it would end there
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
