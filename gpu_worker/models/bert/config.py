"""The configs of encoders of BERT's shape: BERT, RoBERTa, XLM-RoBERTa."""

from dataclasses import dataclass
from typing import Final

from gpu_worker.weights.json_fields import JsonFields
from gpu_worker.weights.model_config import ModelConfig, read_architecture, read_dtype

_SCORES: Final = "ForSequenceClassification"
_ROBERTAS: Final = ("Roberta", "XLMRoberta", "Camembert")
BERT_ARCHITECTURES: Final = tuple(
    f"{family}{head}" for family in ("Bert", *_ROBERTAS) for head in ("Model", _SCORES)
)
_ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(ModelConfig):
    """The config of an encoder. An encoder has no layers with KV."""

    hidden_size: int
    intermediate_size: int
    num_encoder_layers: int
    num_heads: int
    num_positions: int
    first_position: int
    """The row of a sequence's first token in the table of position embeddings."""
    num_token_types: int
    layer_norm_eps: float
    activation: str

    @property
    def is_roberta(self) -> bool:
        return not self.architecture.startswith("Bert")

    @property
    def has_head(self) -> bool:
        return self.architecture.endswith(_SCORES)


def read_bert_config(fields: JsonFields) -> BertConfig:
    """Parse config.json.

    Raises:
        ModelError: A field is missing, malformed, or asks for something unsupported.
    """
    architecture = read_architecture(fields)
    hidden, num_heads = (
        fields.positive_int("hidden_size"),
        fields.positive_int("num_attention_heads"),
    )
    if hidden % num_heads:
        raise fields.error("num_attention_heads", f"must divide hidden_size, {hidden}")
    activation = fields.get("hidden_act", default="gelu")
    if activation not in _ACTIVATIONS:
        raise fields.error("hidden_act", f"is {activation!r}; supported: {', '.join(_ACTIVATIONS)}")
    positions = fields.get("position_embedding_type", default="absolute")
    if positions != "absolute":
        raise fields.error("position_embedding_type", f"is {positions!r}; supported: absolute")
    if fields.boolean("is_decoder", default=False):
        raise fields.error("is_decoder", "is true; only encoders are supported")
    num_labels = len(fields.nested("id2label").values) or 2
    if architecture.endswith(_SCORES) and num_labels != 1:
        raise fields.error("id2label", f"has {num_labels} labels; a model that scores must have 1")
    num_positions = fields.positive_int("max_position_embeddings")
    first = 0
    if not architecture.startswith("Bert"):
        padding = fields.int_list("pad_token_id")  # positions up to this one are for padding
        first = 1 + (padding[0] if padding else 1)
    return BertConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        max_model_len=num_positions - first,
        num_layers=0,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        eos_token_ids=(),
        dtype=read_dtype(fields),
        hidden_size=hidden,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_encoder_layers=fields.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_positions=num_positions,
        first_position=first,
        num_token_types=fields.positive_int("type_vocab_size", default=2),
        layer_norm_eps=fields.number("layer_norm_eps", default=1e-12),
        activation=str(activation),
    )
