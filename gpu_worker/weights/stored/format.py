"""Parses `quantization_config` of a config.json: how a checkpoint stores its linear maps.

Symbols: `N` output features of a linear map, `K` its input features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from gpu_worker.weights.json_fields import JsonFields
from gpu_worker.weights.model_config import read_architecture
from model_files.gguf_config import QUANT_METHOD

_GROUP_SIZES: Final = (32, 64, 128)
MXFP4_GROUP_SIZE: Final = 32
MXFP4_ARCHITECTURE: Final = "GptOssForCausalLM"
"""The only architecture whose weights may be in MXFP4, unless a user's class reads them."""
_DEQUANTIZED: Final = ("fp8", "mxfp4")
_WHOLE: Final = -1
"""The group size in config.json that means one group of all input features."""


class Packing(Enum):
    """The order in which 32-bit words hold integers, starting with a word's lowest bits."""

    AWQ = "awq"
    """Integers are packed along N; each word has outputs 0, 2, 4, 6, 1, 3, 5, 7: the "gemm"
    version."""
    GPTQ = "gptq"
    """Weights are packed along K, zero points along N, both in ascending order."""


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """Unsigned integers; each output feature has a zero point and a scale per group of inputs."""

    packing: Packing
    bits: int
    """4, or with GPTQ also 8."""
    group_size: int | None
    """Input features of a group; None: one group has all."""
    zero_shift: int
    """Added to stored zero points: 1 in GPTQ's first format, else 0."""

    @property
    def title(self) -> str:
        """Its name in the log."""
        return f"{self.packing.value}, {self.bits} bits"


class ScaleShape(Enum):
    """The part of a map that has one scale."""

    TENSOR = "tensor"
    """The whole map."""
    CHANNEL = "channel"
    """An output feature."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Weights in float8_e4m3fn, with scales."""

    scale_shape: ScaleShape | tuple[int, int]
    """A `ScaleShape`, or the numbers of outputs and inputs of a block that has one scale."""
    scale_name: str
    """The name of a map's tensor of scales, without the map's name and the dot after it."""

    @property
    def title(self) -> str:
        """Its name in the log."""
        return "fp8"


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """Blocks of a GGUF file. The name of a map's tensor ends with the type of its blocks."""

    title = "gguf"
    """Its name in the log."""


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """Experts in MXFP4. The model's own code reads them; see `stored/mxfp4.py`."""

    title = "mxfp4"
    """Its name in the log."""


StoredFormat: TypeAlias = IntegerFormat | Fp8Format | GgufFormat | Mxfp4Format


def read_stored_format(fields: JsonFields) -> StoredFormat | None:
    """Read from config.json how a checkpoint stores its maps; None: as plain numbers.

    The tensors show which maps are packed. Lists such as `modules_to_not_convert` and `ignore` have
    the same information, in a different form for each method, and are not read.

    Raises:
        ModelError: The format is not supported; the message names the field.
    """
    if fields.get("quantization_config") is None:
        return None
    config = fields.nested("quantization_config")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise config.error("quant_method", f"is {method!r}; supported: {', '.join(_METHODS)}")
    return _METHODS[method](config)


def check_dequantized(fields: JsonFields) -> None:
    """Raise ModelError if `transformers` cannot dequantize the maps while it reads them."""
    config = fields.nested("quantization_config")
    method = config.get("quant_method")
    if config.values and method not in _DEQUANTIZED:
        raise config.error(
            "quant_method",
            f"is {method!r}; of models that transformers runs, supported:"
            f" {', '.join(_DEQUANTIZED)}",
        )
    check_mxfp4(fields)


def check_mxfp4(fields: JsonFields) -> None:
    """Raise ModelError if the weights are in MXFP4 but the model is not `MXFP4_ARCHITECTURE`."""
    config = fields.nested("quantization_config")
    if config.get("quant_method") != "mxfp4":
        return
    if (architecture := read_architecture(fields)) != MXFP4_ARCHITECTURE:
        raise config.error(
            "quant_method",
            f"is 'mxfp4', which is supported only for {MXFP4_ARCHITECTURE}; the model is a"
            f" {architecture}",
        )


def _awq(config: JsonFields) -> StoredFormat:
    _require(config, "bits", 4)
    _require(config, "zero_point", True)
    version = config.get("version", default="gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise config.error("version", f"is {version!r}; supported: 'gemm'")
    _require(config, "backend", "autoawq", default="autoawq")
    return IntegerFormat(Packing.AWQ, 4, _group_size(config), zero_shift=0)


def _gptq(config: JsonFields) -> StoredFormat:
    bits = _require(config, "bits", 4, 8)
    for name in ("desc_act", "lm_head", "is_marlin_format"):
        if config.boolean(name, default=False):
            raise config.error(name, "is true; supported: false")
    _require(config, "pack_dtype", "int32", default="int32")
    if config.get("dynamic"):
        raise config.error("dynamic", "is set; maps that differ in bits or groups cannot be read")
    version = _require(config, "checkpoint_format", "gptq", "gptq_v2", default="gptq")
    assert isinstance(bits, int)
    return IntegerFormat(
        Packing.GPTQ, bits, _group_size(config), zero_shift=1 if version == "gptq" else 0
    )


def _fp8(config: JsonFields) -> StoredFormat:
    _require(config, "fmt", "e4m3", default="e4m3")
    _require(config, "activation_scheme", "dynamic", "static", default="dynamic")
    block = config.get("weight_block_size")
    if block is None:
        return Fp8Format(ScaleShape.TENSOR, "weight_scale")
    if (
        not isinstance(block, list)
        or len(block) != len(("N", "K"))
        or not all(isinstance(size, int) and size > 0 for size in block)
    ):
        raise config.error("weight_block_size", f"is {block!r}; it must be two positive integers")
    return Fp8Format((block[0], block[1]), "weight_scale_inv")


def _compressed_tensors(config: JsonFields) -> StoredFormat:
    _require(config, "format", "float-quantized")
    if config.get("kv_cache_scheme") is not None:
        raise config.error("kv_cache_scheme", "is set; scales of KV in a checkpoint are not read")
    if config.nested("sparsity_config").get("format", default="dense") != "dense":
        raise config.error("sparsity_config", "is set; only dense weights are supported")
    groups = config.nested("config_groups")
    if len(groups.values) != 1:
        raise config.error("config_groups", f"has {len(groups.values)} groups; supported: 1")
    group = groups.nested(next(iter(groups.values)))
    if group.get("targets") != ["Linear"]:
        raise group.error("targets", f"is {group.get('targets')!r}; supported: ['Linear']")
    weights = group.nested("weights")
    _require(weights, "type", "float")
    _require(weights, "num_bits", 8)
    strategy = _require(weights, "strategy", *(shape.value for shape in ScaleShape))
    return Fp8Format(ScaleShape(strategy), "weight_scale")


_METHODS: Final[dict[str, Callable[[JsonFields], StoredFormat]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": lambda _: Mxfp4Format(),
    QUANT_METHOD: lambda _: GgufFormat(),
}


def _require(config: JsonFields, name: str, *supported: object, default: object = None) -> object:
    """Return a field, which must have one of the `supported` values."""
    value = config.get(name, default)
    if value not in supported:
        choices = ", ".join(map(repr, supported))
        raise config.error(name, f"is {value!r}; supported: {choices}")
    return value


def _group_size(config: JsonFields) -> int | None:
    size = _require(config, "group_size", *_GROUP_SIZES, _WHOLE)
    assert isinstance(size, int)
    return None if size == _WHOLE else size
