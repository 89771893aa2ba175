"""Model directories without weights, of the shapes that `gpu.py` measures.

They have a config and a tokenizer that has a text for every token. Weights are drawn on the device
(`--load-format dummy`): a model's speed does not depend on them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_BOS, _EOS = "<s>", "</s>"


@dataclass(frozen=True, slots=True)
class Shape:
    """What sets a Llama's cost."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_tied: bool
    context: int = 8192

    @property
    def step_parameters(self) -> int:
        """Those that each decode step reads: all but the embedding, unless it is the head, too."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.vocab * self.hidden

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def config(self, dtype: str) -> dict[str, object]:
        """As config.json has it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.is_tied,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": dtype,
        }


SHAPES: Final = {
    "0.6B": Shape(1024, 28, 16, 8, 128, 3072, 151_936, is_tied=True),
    "1B": Shape(2048, 16, 32, 8, 64, 8192, 128_256, is_tied=True),
    "8B": Shape(4096, 32, 32, 8, 128, 14_336, 128_256, is_tied=False),
    "smoke": Shape(64, 1, 2, 1, 32, 64, 1024, is_tied=True, context=256),
}
"""Those of Qwen3 0.6B, Llama 3.2 1B and Llama 3.1 8B, and one for trying the scripts out."""


def write_model(directory: Path, shape: Shape, dtype: str = "bfloat16") -> None:
    """Write the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config(dtype), indent=1))
    special = {"bos_token": _BOS, "eos_token": _EOS}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"w{number}" for number in range(shape.vocab - len(letters) - 2))
    vocabulary = {text: i for i, text in enumerate([_BOS, _EOS, *letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_BOS, _EOS])
    tokenizer.save(str(directory / "tokenizer.json"))
