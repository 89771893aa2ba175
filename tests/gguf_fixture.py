"""Writes GGUF files as llama.cpp's converter does, from the directories of `models_fixture`."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

SIZES: dict[str, Any] = {
    "hidden_size": 256,  # a block of the K types
    "intermediate_size": 256,
    "initializer_range": 0.08,
}
"""Overrides for `make_model`, so that all types fit."""

PLAIN_KINDS = ("F32", "F16", "BF16")
SMALL_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_KINDS = ("Q4_K", "Q5_K", "Q6_K")
KINDS = (*PLAIN_KINDS, *SMALL_KINDS, *K_KINDS)

_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Offsets of a block's float16 scales: of its values, of its minima."""
_STEPS = {"Q4_K": 2.7e-4, "Q5_K": 1.3e-4, "Q6_K": 6e-5}
"""Scales that give random blocks weights of the usual size."""
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_output",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def random_blocks(kind: str, num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    """uint8[num_rows, bytes] of one of `K_KINDS`, for which the package has no quantizer."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    shape = num_rows, num_columns // block_size, block_bytes
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    middle = {"Q4_K": 7.5, "Q5_K": 15.5}.get(kind, 1.0)
    for start, size in zip(_SCALES[kind], (1.0, middle), strict=False):
        numbers = _STEPS[kind] * size * generator.uniform(0.5, 1.5, (*shape[:2], 1))
        blocks[..., start : start + 2] = numbers.astype(np.float16).view(np.uint8)
    return blocks.reshape(num_rows, -1)


def write_gguf(
    directory: Path, path: Path, kind: str, max_tensors: int = 0, **metadata: Any
) -> Path:
    """Write a directory's model with all matrices in one kind of numbers. Those in `K_KINDS` are
    random. With `max_tensors` there are several files, each with so many tensors. `metadata`
    replaces fields, or removes those that are None.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = {
        "gemma3_text": "gemma3",
        "mixtral": "llama",
        "qwen3_moe": "qwen3moe",
    }.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=max_tensors)
    fields = _config_fields(architecture, config) | _tokenizer_fields(directory) | metadata
    for name, value in fields.items():
        if value is not None:
            _add(writer, name, value)
    for number, (name, tensor) in enumerate(_tensors(directory, config, architecture).items()):
        is_small = tensor.ndim == 1 or "ffn_gate_inp" in name
        its_kind = GGMLQuantizationType["F32" if is_small else kind]
        if its_kind.name in K_KINDS:
            data = random_blocks(kind, tensor.shape[0], tensor.shape[1], seed=number)
        else:
            data = gguf.quantize(tensor.astype(np.float32), its_kind)
        writer.add_tensor(name, data, raw_dtype=its_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not max_tensors else min(path.parent.glob(f"{path.stem}-*.gguf"))


def _config_fields(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    ropes = config["rope_parameters"]
    fields = {
        "context_length": config["max_position_embeddings"],
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config.get("head_dim"),
        "rope.freq_base": ropes.get("full_attention", ropes)["rope_theta"],
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention.sliding_window": config.get("sliding_window")
        if architecture in ("gemma2", "gemma3")
        else None,
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def _tokenizer_fields(directory: Path) -> dict[str, Any]:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), size)]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            3 if token in special else 5 if token.startswith("[PAD") else 1 for token in tokens
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.bos_token_id": vocabulary[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocabulary[settings["eos_token"]],
        "tokenizer.chat_template": settings["chat_template"],
    }


def _tensors(directory: Path, config: dict[str, Any], architecture: str) -> dict[str, np.ndarray]:
    """The model's tensors as in a GGUF file: those of experts are joined."""
    heads = {"self_attn.q_proj": config["num_attention_heads"]}
    heads["self_attn.k_proj"] = config["num_key_value_heads"]
    is_gemma = architecture.startswith("gemma")
    named: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in sorted(load_file(directory / "model.safetensors").items()):
        base, _, end = name.rpartition(".")
        if base in _NAMES:
            is_norm = is_gemma and base == "model.norm"
            named[f"{_NAMES[base]}.{end}"] = tensor + 1 if is_norm else tensor
            continue
        _, _, layer, part = base.split(".", 3)
        values = tensor
        if is_gemma and name.endswith("norm.weight"):
            values = tensor + 1
        if architecture == "llama" and part in heads:
            values = _permuted(tensor, heads[part])
        if ".experts." in part:
            last = part.rpartition(".")[2].removesuffix("_proj")
            which = {"w1": "gate", "w2": "down", "w3": "up"}.get(last, last)
            experts.setdefault(f"blk.{layer}.ffn_{which}_exps.{end}", []).append(values)
        else:
            its_name = _NAMES[part]
            if part == "post_attention_layernorm" and architecture in ("gemma2", "gemma3"):
                its_name = "post_attention_norm"
            named[f"blk.{layer}.{its_name}.{end}"] = values
    return named | {name: np.stack(each) for name, each in experts.items()}


def _permuted(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of Llama's queries and keys in the order of llama.cpp's converter."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)
