"""Makes tiny encoders: random weights of `transformers`, and a tokenizer that marks pairs."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = [
    "A quire is a gathering of pages.",
    "Several quires make a book.",
    "The dog sleeps in the sun.",
]
LONGEST = 62
"""Most tokens of an input."""


def make_encoder(directory: Path, architecture: str, **fields: Any) -> Path:
    """Write a random encoder of `transformers`, and a tokenizer with token types."""
    import transformers  # noqa: PLC0415

    is_roberta = "Roberta" in architecture
    config_class = "XLMRobertaConfig" if is_roberta else "BertConfig"
    config = getattr(transformers, config_class)(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.3,
        pad_token_id=1,
        max_position_embeddings=LONGEST + 2 * is_roberta,
        type_vocab_size=1 if is_roberta else 2,
        **fields,
    )
    torch.manual_seed(3)
    model = getattr(transformers, architecture)(config).eval()
    for name, parameter in model.named_parameters():
        if "LayerNorm" in name or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]"}))
    return directory
