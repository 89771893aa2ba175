"""Makes tiny model directories: random weights of each family and a real small tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The families with which every test of the whole service runs."""
NATIVE_FAMILIES = (
    *(
        *FAMILIES,
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "gpt_oss",
        "mixtral",
        "olmo2",
        "olmoe",
        "nemotron",
        "phi3",
    ),
    *("qwen2_moe", "qwen3_moe", "stablelm", "starcoder2"),
)

BOS_TOKEN, EOS_TOKEN = "<s>", "</s>"
BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1
_ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|system|>{{ tools | tojson }} Call: <tool_call>{...}</tool_call>{% endif %}"
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message.tool_calls or () %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}"
    "{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the warm sun.",
    "A quire is a gathering of pages; several quires sewn together make a book to be read.",
    "In the beginning there was a prompt, and the prompt was without form, and void.",
    "def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n    print(add(i, 1))\n",
    "Grüße aus Köln, naïve café, Ελλάδα, Привет мир, 你好世界, 🙂🚀",
    "One two three four five six seven eight nine ten eleven twelve thirteen fourteen.",
)

_LATENT = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
}
"""Multi-head latent attention, and experts in the second layer; a family ignores what it lacks."""

_GEMMA = {"head_dim": 16, "sliding_window": 20, "num_hidden_layers": 3}
_GLM = {"head_dim": 16, "pad_token_id": 0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


class ModelDirs:
    """Model directories under one root, each made on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._dirs: dict[str, Path] = {}

    def get(self, family: str, **arguments: Any) -> Path:
        """The directory that `make_model` makes from these arguments; tests must not change it."""
        key = json.dumps([family, arguments], sort_keys=True)
        if key not in self._dirs:
            directory = self._root / f"{family}-{len(self._dirs)}"
            self._dirs[key] = make_model(directory, family, **arguments)
        return self._dirs[key]


def make_model(
    directory: Path,
    family: str,
    seed: int = 0,
    *,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random model of a family, as `transformers` saves it, and its tokenizer.

    Args:
        directory: created if missing; it is returned.
        family: a `model_type` of transformers.
        seed: seed of the weights.
        dtype: dtype of the checkpoint.
        max_shard_size: the most bytes per file of weights, such as "50KB".
        overrides: fields of the config, such as `tie_word_embeddings=True`.
    """
    # Here, not above: importing a model takes seconds, and not every importer makes one.
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    sizes = {
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # the usual 0.02 makes logits so flat that ties decide
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "tie_word_embeddings": False,
    }
    by_family: dict[str, dict[str, Any]] = {
        "llama": {},
        "deepseek_v2": _LATENT | {"q_lora_rank": None, "n_shared_experts": 2},
        "deepseek_v3": _LATENT | {"n_group": 4, "topk_group": 2},
        "gemma": _GEMMA,
        "gemma2": _GEMMA
        | {
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 20,
        },
        "gemma3_text": _GEMMA | {"query_pre_attn_scalar": 20, "sliding_window_pattern": 2},
        "glm": _GLM,
        "glm4": _GLM,
        "glm4_moe": _EXPERTS
        | {"n_routed_experts": 6, "first_k_dense_replace": 1, "use_qk_norm": True},
        "glm4_moe_lite": _LATENT,
        "gpt_neox": {"initializer_range": 0.35},
        "gpt_oss": {
            "head_dim": 16,
            "intermediate_size": 96,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 20,
            "pad_token_id": EOS_TOKEN_ID,
        },
        "minicpm3": _LATENT | {"scale_emb": 2.0, "scale_depth": 3.0, "dim_model_base": 32},
        # A window shorter than most prompts.
        "mistral": {"sliding_window": 20, "num_attention_heads": 8},
        "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
        "nemotron": {"initializer_range": 0.2},
        "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
        "phi3": {"pad_token_id": 0, "partial_rotary_factor": 0.75},
        "qwen2": {"num_hidden_layers": 3},
        "qwen2_moe": _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 96},
        "qwen3": {"head_dim": 24},
        "qwen3_moe": _EXPERTS | {"num_experts": 4, "head_dim": 16, "norm_topk_prob": True},
        "starcoder2": {"sliding_window": 20, "initializer_range": 0.3},
        "youtu": _LATENT,
    }
    config = AutoConfig.for_model(family, **(sizes | by_family.get(family, {}) | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            # initialized to 1 and 0, which would hide mistakes
            if "norm" in name or name.endswith("bias"):
                parameter.data += 0.2 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    _write_tokenizer(directory, config.vocab_size)
    return directory


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN, *_ROLE_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A", special_tokens=[(BOS_TOKEN, BOS_TOKEN_ID)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN,  # otherwise transformers adds one, past the model's vocabulary
        "unk_token": EOS_TOKEN,
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
