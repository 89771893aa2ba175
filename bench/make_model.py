"""Writes a Hugging Face model directory: a Llama with random weights and a real BPE tokenizer.

    python bench/make_model.py /tmp/llama-125m

The speed of a model does not depend on its weights. The tokenizer is trained on the sources of
Python's standard library; weights and tokens are the same each time.
"""

import argparse
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_BOS, _EOS = "<s>", "</s>"
_CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}<s>assistant:"
)
_WEIGHT_STD = 0.02


@dataclass(frozen=True, slots=True)
class Sizes:
    """What sets a Llama's cost; the defaults have 125 million parameters."""

    hidden: int = 768
    layers: int = 16
    heads: int = 12
    kv_heads: int = 4
    intermediate: int = 2048
    vocab: int = 16000
    context: int = 4096


def make_model(directory: Path, sizes: Sizes) -> int:
    """Write the model, in bfloat16; returns its number of parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(sizes))
    special = {"bos_token": _BOS, "eos_token": _EOS, "chat_template": _CHAT_TEMPLATE}
    _write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **special},
    )
    _train_tokenizer(sizes.vocab).save(str(directory / "tokenizer.json"))
    weights = _random_weights(sizes)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())


def _config(sizes: Sizes) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": sizes.intermediate,
        "max_position_embeddings": sizes.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def _train_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_BOS, _EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(source) for source in sources], trainer)
    return tokenizer


def _random_weights(sizes: Sizes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(num_out: int, num_in: int) -> torch.Tensor:
        weight = torch.empty(num_out, num_in, dtype=torch.bfloat16)  # [out, in], as linears have it
        return weight.normal_(std=_WEIGHT_STD, generator=generator)

    def norm() -> torch.Tensor:
        return torch.ones(sizes.hidden, dtype=torch.bfloat16)

    head_dim = sizes.hidden // sizes.heads
    kv = sizes.kv_heads * head_dim
    weights = {
        "model.embed_tokens.weight": matrix(sizes.vocab, sizes.hidden),
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(sizes.vocab, sizes.hidden),
    }
    for index in range(sizes.layers):
        layer = {
            "self_attn.q_proj": matrix(sizes.hidden, sizes.hidden),
            "self_attn.k_proj": matrix(kv, sizes.hidden),
            "self_attn.v_proj": matrix(kv, sizes.hidden),
            "self_attn.o_proj": matrix(sizes.hidden, sizes.hidden),
            "mlp.gate_proj": matrix(sizes.intermediate, sizes.hidden),
            "mlp.up_proj": matrix(sizes.intermediate, sizes.hidden),
            "mlp.down_proj": matrix(sizes.hidden, sizes.intermediate),
            "input_layernorm": norm(),
            "post_attention_layernorm": norm(),
        }
        weights |= {f"model.layers.{index}.{name}.weight": w for name, w in layer.items()}
    return weights


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write a Llama with random weights and a real tokenizer, for benchmarks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=Sizes().hidden, help="size of a token's row")
    parser.add_argument("--layers", type=int, default=Sizes().layers, help="decoder layers")
    parser.add_argument("--heads", type=int, default=Sizes().heads, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=Sizes().kv_heads, help="key-value heads")
    parser.add_argument(
        "--intermediate", type=int, default=Sizes().intermediate, help="width of the MLP"
    )
    return parser.parse_args()


if __name__ == "__main__":
    arguments = vars(_parse_arguments())
    directory = arguments.pop("directory")
    num_parameters = make_model(directory, Sizes(**arguments))
    print(f"{directory}: a Llama of {num_parameters / 1e6:.0f} M parameters")
