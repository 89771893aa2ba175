"""Writes a trained model as a Hugging Face directory, with its model card."""

import json
import math
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import BOS, EOS, HELD_OUT_ONE_IN
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

CARD = Path(__file__).parent / "card.md"

# Users write comments, the assistant writes code: the training text has only this kind of
# conversation.
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
    """The facts about the training in the model card."""

    num_steps: int
    num_tokens: int
    stream_shares: dict[str, float]
    corpus_tokens: dict[str, int]
    train_loss: float
    held_out_loss: float  # nats per token
    num_bytes_per_token: float
    hours: float
    seed: int


def export_model(
    model: LlamaForCausalLM, tokenizer: Tokenizer, facts: Facts, model_dir: Path
) -> None:
    """Replaces the files in `model_dir`; a reader finds each file complete, either old or new."""
    staging = model_dir.with_name(f".{model_dir.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    # Tied: the embedding is also the output matrix, and is written once.
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
    streams = "\n".join(
        f"| {name} | {facts.corpus_tokens[name] / 1e6:.1f} | {share:.0%} |"
        for name, share in facts.stream_shares.items()
    )
    return CARD.read_text().format(
        num_parameters=num_parameters / 1e6,
        size_mb=2 * num_parameters / 1e6,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        max_model_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        num_bytes_per_token=facts.num_bytes_per_token,
        num_tokens=facts.num_tokens / 1e6,
        num_steps=facts.num_steps,
        hours=facts.hours,
        minutes=facts.hours * 60,
        train_loss=facts.train_loss,
        held_out_loss=facts.held_out_loss,
        bits_per_byte=facts.held_out_loss / facts.num_bytes_per_token / math.log(2),
        held_out_one_in=HELD_OUT_ONE_IN,
        python_version=platform.python_version(),
        streams=streams,
        bos=BOS,
        eos=EOS,
        seed=facts.seed,
    )
