"""The facts that the worker needs about any model, parsed from `config.json`."""

from dataclasses import dataclass

from contract.worker_limits import KvWindow
from gpu_worker.weights.json_fields import JsonFields, ModelError, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a decoder, as far as code outside the model needs them.

    A family's config derives from this class and adds the fields that its model needs.
    """

    architecture: str
    """The name in `architectures` of config.json, such as "LlamaForCausalLM"."""
    vocab_size: int
    max_model_len: int
    """The largest number of tokens in a sequence."""
    num_layers: int
    """The number of layers with attention; each has keys and values in the KV pool."""
    num_kv_heads: int
    """KV heads of each layer, unless `kv_shapes` is set."""
    head_dim: int
    """Head dim of keys and values of each layer, unless `kv_shapes` is set."""
    kv_shapes: tuple[tuple[int, int], ...] = ()
    """KV heads and head dim of each layer. Empty: every layer has `num_kv_heads` and `head_dim`."""
    latent_dim: int | None = None
    """With multi-head latent attention, a value is the first `latent_dim` numbers of its key, so
    values are not stored. None: values are stored."""
    has_exact_keys: bool = False
    """Whether keys also hold numbers that encode the position, as with ALiBi. 8 bits cannot
    represent these numbers well enough, so the KV must not be rounded to 8 bits."""
    eos_token_ids: tuple[int, ...]
    """The end tokens, from config.json and generation_config.json; may be empty."""
    windows: tuple[KvWindow, ...] = ()
    """The window of each layer. Empty: no layer has a window."""
    num_states: int = 0
    """Number of recurrent layers; each has one state per sequence."""
    state_bytes: int = 0
    """Bytes of the largest state."""
    dtype: str
    """The checkpoint's dtype, one of `DTYPES`; float32 if config.json has none."""

    @property
    def is_encoder(self) -> bool:
        """Whether the model stores neither KV nor recurrent states, and so generates no tokens."""
        return self.num_layers == self.num_states == 0

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Return the number of KV heads and the head dim of a layer."""
        return self.kv_shapes[layer] if self.kv_shapes else (self.num_kv_heads, self.head_dim)


DTYPES = ("float32", "float16", "bfloat16")
"""Number formats that a model can run in, by torch's names, which config.json and flags use."""


def resolve_dtype(name: str, config: ModelConfig) -> str:
    """Return the dtype that `name`, a flag's value, stands for; "auto" is the checkpoint's dtype.

    Raises:
        ModelError: `name` is neither "auto" nor one of `DTYPES`.
    """
    if name == "auto":
        return config.dtype
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}; it must be one of auto, {', '.join(DTYPES)}")
    return name


def read_architecture(fields: JsonFields) -> str:
    """Return the only name in `architectures`."""
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", "must be a list of one name")
    return names[0]


def read_model_config(fields: JsonFields) -> ModelConfig:
    """Parse config.json and generation_config.json, with the field names that most families use.

    Raises:
        ModelError: A file or field is missing or malformed.
    """
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads, {num_heads}")
    return ModelConfig(
        architecture=read_architecture(fields),
        vocab_size=fields.positive_int("vocab_size"),
        max_model_len=fields.positive_int("max_position_embeddings"),
        num_layers=fields.positive_int("num_hidden_layers"),
        num_kv_heads=num_kv_heads,
        head_dim=fields.positive_int("head_dim", default=hidden_size // num_heads),
        eos_token_ids=read_eos_token_ids(fields),
        dtype=read_dtype(fields),
    )


def read_eos_token_ids(fields: JsonFields) -> tuple[int, ...]:
    """Read the end tokens of config.json, and of generation_config.json beside it."""
    ids = fields.int_list("eos_token_id")
    generation_config = fields.path.with_name("generation_config.json")
    if generation_config.exists():
        ids += read_json(generation_config).int_list("eos_token_id")
    return tuple(dict.fromkeys(ids))


def read_dtype(fields: JsonFields) -> str:
    """Read the checkpoint's dtype."""
    # transformers 5 writes `dtype`, older versions write `torch_dtype`.
    name = fields.get("dtype", default=fields.get("torch_dtype", default="float32"))
    if not isinstance(name, str) or name not in DTYPES:
        raise fields.error("dtype", f"is {name!r}; supported: {', '.join(DTYPES)}")
    return name
