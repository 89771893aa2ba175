"""Writes a trained model as a Hugging Face directory, with its model card."""

import json
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import BOS, EOS
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

# Users speak in comments, the assistant in code: the one kind of conversation that the training
# text holds.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- message['content'] | trim + '\\n\\n\\n' }}"
    "{%- else %}"
    "{{- '# ' + message['content'] | trim | replace('\\n', '\\n# ') + '\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the model card tells about the training."""

    num_tokens: int
    corpus_tokens: dict[str, int]
    train_loss: float
    held_out_loss: float  # nats per token
    num_bytes_per_token: float
    hours: float
    seed: int


def export_model(
    model: LlamaForCausalLM, tokenizer: Tokenizer, facts: Facts, model_dir: Path
) -> None:
    """Replaces `model_dir`; a reader finds the old files or the new ones, each of them whole."""
    staging = model_dir.with_name(f".{model_dir.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    # Tied: the embedding is the output matrix too, and is written once.
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, staging / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_diff_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
    }
    _write_json(staging / "config.json", config)
    _write_json(
        staging / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]},
    )
    tokenizer.save(str(staging / "tokenizer.json"))
    _write_json(
        staging / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (staging / "README.md").write_text(_card(model, facts))
    model_dir.mkdir(parents=True, exist_ok=True)
    for file in staging.iterdir():
        file.chmod(0o644)
        file.replace(model_dir / file.name)
    staging.rmdir()


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _card(model: LlamaForCausalLM, facts: Facts) -> str:
    config = model.config
    num_parameters = sum(p.numel() for p in model.parameters())
    bits_per_byte = facts.held_out_loss / facts.num_bytes_per_token / 0.6931
    corpus = ", ".join(f"{name} {count / 1e6:.1f} M" for name, count in facts.corpus_tokens.items())
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [code, python]
---
# quire-tiny-python

A language model of {num_parameters / 1e6:.1f} million parameters that continues Python code. It is small
enough to ship in Quire's repository, so that `quire up` has something to serve and the tests have
something real to decode. It is not meant to be useful beyond that.

| | |
|---|---|
| Architecture | Llama: {config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} query heads, \
{config.num_key_value_heads} key-value heads, tied embeddings, bfloat16 |
| Context | {config.max_position_embeddings} tokens |
| Vocabulary | {config.vocab_size}, byte-level BPE; {facts.num_bytes_per_token:.2f} bytes of Python per token |
| Trained on | {facts.num_tokens / 1e6:.1f} M tokens, {facts.hours:.1f} hours |
| Loss, training | {facts.train_loss:.3f} nats per token (average over all three streams) |
| Loss, held out | {facts.held_out_loss:.3f} nats per token, {bits_per_byte:.3f} bits per byte, on library files not trained on |

## Data and licence

The sources of the standard library of CPython {platform.python_version()}, as installed with the
interpreter that ran the training; nothing else. Tokens: {corpus}. The library is
© Python Software Foundation, under the PSF License Agreement, which permits derivative works. The
weights are released under Apache-2.0 like the rest of Quire. With so little text seen several times
over, the model does recite: what it writes may be a passage of the standard library.

## Prompts

It continues code. A comment and the beginning of a definition work best:

    # Return the sum of two numbers.
    def add(

The chat template writes what the user says as a comment and lets the assistant continue in code.
The model has never seen a conversation and follows no instructions. Text begins with `{BOS}`; the
model writes `{EOS}` where a piece of code is complete.

## Limits

Its code looks like Python and mostly parses; it rarely does anything sensible. It knows no
language but Python and comments in English, and repeats itself when decoded greedily for long.

## Training it again

    pip install -e '.[worker,dev]'
    python models/train.py --minutes {facts.hours * 60:.0f}

Batches are a function of the seed ({facts.seed}) and the step; the number of steps depends on the
machine, since the learning rate falls by the clock. `--export` writes this directory from the newest
checkpoint.
"""
