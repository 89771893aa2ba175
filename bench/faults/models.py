"""Models with the shipped model's tokenizer, but other kinds of layers."""

import shutil
from pathlib import Path
from typing import Any, Final

from harness.case import SHIPPED_MODEL

_LOCAL, _FULL = "sliding_attention", "full_attention"
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    # Three KV groups; two have a window.
    "window": (
        "gemma3_text",
        {
            "layer_types": [_LOCAL, _LOCAL, _FULL, _LOCAL, _LOCAL],
            "num_hidden_layers": 5,
            "sliding_window": 64,
            "head_dim": 32,
        },
    ),
    "recurrent": (
        "bamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_indices": [2],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
        },
    ),
    "states-only": ("mamba2", {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 2}),
}
"""Maps a kind to its model type and config fields, beside the sizes that all kinds have."""
_SIZES: Final = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # the usual 0.02 makes logits so flat that rounding decides
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def write_family(directory: Path, kind: str) -> Path:
    """Write a model with random weights, one of `KINDS`, in float32; returns its directory."""
    # Imported here, because the imports take seconds, and most runs do not need them.
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    family, config = KINDS[kind]
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(_SIZES | config)))
    made.save_pretrained(directory := directory / kind)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / name, directory)
    return directory
