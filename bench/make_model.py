"""Writes a Hugging Face model directory: a Llama with random weights, for benchmarks.

    python bench/make_model.py /tmp/llama-125m

A model's speed does not depend on its weights. The tokenizer is a real BPE, trained on the sources
of Python's standard library. For a vocabulary that is too large for such training, the tokenizer
just has a text for every token. Weights and tokenizer are the same each time. With --shape, the
directory has the sizes of a known model and no weights: the worker draws random weights on the
device (`--load-format dummy`).
"""

import argparse
import json
import sysconfig
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_BOS, _EOS = "<s>", "</s>"
_CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}<s>assistant:"
)
_WEIGHT_STD = 0.02
_MAX_TRAINED_VOCAB = 16_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a Llama; the defaults have 125 million parameters."""

    hidden: int = 768
    layers: int = 16
    heads: int = 12
    kv_heads: int = 4
    intermediate: int = 2048
    vocab: int = 16000
    context: int = 4096
    head_dim: int = 0
    """0 stands for the hidden size ÷ the number of heads."""
    is_tied: bool = False
    """Whether the embedding is also the map over the vocabulary."""

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def step_parameters(self) -> int:
        """Parameters that each decode step reads: all but the embedding, unless it is tied."""
        attention = self.hidden * self.dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.vocab * self.hidden

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.layers * self.kv_heads * self.dim * itemsize

    def config(self) -> dict[str, Any]:
        """The fields of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.is_tied,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
        }


SHAPES = {
    "0.6B": Sizes(1024, 28, 16, 8, 3072, 151_936, 8192, 128, is_tied=True),
    "1B": Sizes(2048, 16, 32, 8, 8192, 128_256, 8192, 64, is_tied=True),
    "8B": Sizes(4096, 32, 32, 8, 14_336, 128_256, 8192, 128),
    "smoke": Sizes(64, 1, 2, 1, 64, 1024, 256, 32, is_tied=True),
}
"""The sizes of Qwen3 0.6B, Llama 3.2 1B and Llama 3.1 8B, and a tiny model to try scripts."""


def make_model(directory: Path, sizes: Sizes) -> int:
    """Write a model with weights, in bfloat16; return its number of parameters."""
    is_trained = sizes.vocab <= _MAX_TRAINED_VOCAB
    tokenizer = _trained_tokenizer(sizes.vocab) if is_trained else _word_tokenizer(sizes.vocab)
    _write(directory, sizes, tokenizer)
    weights = _random_weights(sizes)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())


def write_shape(directory: Path, sizes: Sizes) -> None:
    """Write a model without weights."""
    _write(directory, sizes, _word_tokenizer(sizes.vocab))


def _write(directory: Path, sizes: Sizes, tokenizer: Tokenizer) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    special = {"bos_token": _BOS, "eos_token": _EOS, "chat_template": _CHAT_TEMPLATE}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    for name, values in (("config", sizes.config()), ("tokenizer_config", tokenizer_config)):
        (directory / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n")
    tokenizer.save(str(directory / "tokenizer.json"))


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _trained_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = _byte_level(models.BPE())
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_BOS, _EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(source) for source in sources], trainer)
    return tokenizer


def _word_tokenizer(vocab_size: int) -> Tokenizer:
    """Make a tokenizer that has a text for every token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"w{number}" for number in range(vocab_size - len(letters) - 2))
    vocabulary = {text: i for i, text in enumerate([_BOS, _EOS, *letters, *words])}
    tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([_BOS, _EOS])
    return tokenizer


def _random_weights(sizes: Sizes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(num_out: int, num_in: int) -> torch.Tensor:
        weight = torch.empty(num_out, num_in, dtype=torch.bfloat16)  # [out, in], as linears have it
        return weight.normal_(std=_WEIGHT_STD, generator=generator)

    def norm() -> torch.Tensor:
        return torch.ones(sizes.hidden, dtype=torch.bfloat16)

    heads, kv = sizes.heads * sizes.dim, sizes.kv_heads * sizes.dim
    weights = {
        "model.embed_tokens.weight": matrix(sizes.vocab, sizes.hidden),
        "model.norm.weight": norm(),
    }
    if not sizes.is_tied:
        weights["lm_head.weight"] = matrix(sizes.vocab, sizes.hidden)
    for index in range(sizes.layers):
        layer = {
            "self_attn.q_proj": matrix(heads, sizes.hidden),
            "self_attn.k_proj": matrix(kv, sizes.hidden),
            "self_attn.v_proj": matrix(kv, sizes.hidden),
            "self_attn.o_proj": matrix(sizes.hidden, heads),
            "mlp.gate_proj": matrix(sizes.intermediate, sizes.hidden),
            "mlp.up_proj": matrix(sizes.intermediate, sizes.hidden),
            "mlp.down_proj": matrix(sizes.hidden, sizes.intermediate),
            "input_layernorm": norm(),
            "post_attention_layernorm": norm(),
        }
        weights |= {f"model.layers.{index}.{name}.weight": w for name, w in layer.items()}
    return weights


def _main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, help="sizes of a known model, without weights")
    numbers = [each for each in fields(Sizes) if each.type is int]
    for each in numbers:
        flag = f"--{each.name.replace('_', '-')}"
        parser.add_argument(flag, type=int, help=f"default: {each.default}")
    given = parser.parse_args()
    if given.shape is not None:
        write_shape(given.directory, SHAPES[given.shape])
        return
    asked = {each.name: getattr(given, each.name) for each in numbers}
    sizes = replace(Sizes(), **{name: value for name, value in asked.items() if value is not None})
    num_parameters = make_model(given.directory, sizes)
    print(f"{given.directory}: a Llama of {num_parameters / 1e6:.0f} M parameters")


if __name__ == "__main__":
    _main()
