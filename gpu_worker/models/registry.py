"""Finds the implementation for a model directory: one of ours, transformers', or the user's."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import structlog
import torch

from gpu_worker.models.attention import Decoder
from gpu_worker.models.bert.config import BERT_ARCHITECTURES, read_bert_config
from gpu_worker.models.bert.encoder import build_bert
from gpu_worker.models.deepseek.config import (
    DEEPSEEK_ARCHITECTURES,
    read_deepseek_config,
    split_deepseek_config,
)
from gpu_worker.models.deepseek.decoder import build_deepseek
from gpu_worker.models.gpt_oss.config import (
    GPT_OSS_ARCHITECTURE,
    read_gpt_oss_config,
    split_gpt_oss_config,
)
from gpu_worker.models.gpt_oss.decoder import build_gpt_oss
from gpu_worker.models.layer_norm.config import (
    LAYER_NORM_ARCHITECTURES,
    read_layer_norm_config,
    split_layer_norm_config,
)
from gpu_worker.models.layer_norm.decoder import build_layer_norm_decoder
from gpu_worker.models.llama.config import (
    LLAMA_ARCHITECTURES,
    read_llama_config,
    split_llama_config,
)
from gpu_worker.models.llama.decoder import build_llama
from gpu_worker.models.rope import with_long_factors
from gpu_worker.models.text_part import (
    has_stacked_experts,
    has_text_part,
    name_alone,
    text_part,
)
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.ranks.shards import ALONE, Place
from gpu_worker.weights.json_fields import JsonFields, ModelError, UnsupportedError, read_json
from gpu_worker.weights.model_config import ModelConfig, read_architecture
from gpu_worker.weights.quantized_linear import Quantization
from gpu_worker.weights.reader import Weights, draw_weights, load_weights
from gpu_worker.weights.stored.format import (
    Mxfp4Format,
    check_dequantized,
    check_mxfp4,
    read_stored_format,
)

_TRANSFORMERS: Final = "transformers"

_log = structlog.get_logger()


class ModelSource(Protocol):
    """A model directory, and how to load it."""

    @property
    def config(self) -> ModelConfig:
        """The facts about the model that are known before its weights are read."""

    @property
    def local_config(self) -> ModelConfig:
        """The config of this rank's part of the model; equal to `config` on a single device."""

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None],
        ranks: Ranks | None = None,
    ) -> Decoder:
        """Read the weights and build the model.

        Args:
            dtype: The dtype of weights and activations.
            device: Where to put the model.
            progress: Called with the fraction of weights read, up to 1.
            ranks: The devices that share the model; None: this device only.

        Raises:
            ModelError: The checkpoint is missing, damaged, or does not fit the model.
        """


@dataclass(frozen=True, slots=True)
class _Implementation:
    """How to read a config, and how to build the model; a user's class defines both."""

    read_config: Callable[[JsonFields], ModelConfig]
    build: Callable[[Any, Weights], Decoder]
    """Takes the result of `read_config`."""
    split_config: Callable[[Any, Place], ModelConfig] | None = None
    """Takes the result of `read_config`, and returns the config of one rank's part; None: the model
    runs on one device only."""


_LLAMA: Final = _Implementation(read_llama_config, build_llama, split_llama_config)
_NATIVE: Final = {
    **dict.fromkeys(LLAMA_ARCHITECTURES, _LLAMA),
    **dict.fromkeys(BERT_ARCHITECTURES, _Implementation(read_bert_config, build_bert)),
    GPT_OSS_ARCHITECTURE: _Implementation(read_gpt_oss_config, build_gpt_oss, split_gpt_oss_config),
    **dict.fromkeys(
        LAYER_NORM_ARCHITECTURES,
        _Implementation(read_layer_norm_config, build_layer_norm_decoder, split_layer_norm_config),
    ),
    **dict.fromkeys(
        DEEPSEEK_ARCHITECTURES,
        _Implementation(read_deepseek_config, build_deepseek, split_deepseek_config),
    ),
}


class _CheckpointSource:
    """The `ModelSource` of a model that runs on Quire's own code, or on a user's class."""

    def __init__(
        self,
        directory: Path,
        fields: JsonFields,
        implementation: _Implementation,
        quantization: Quantization | None,
        place: Place,
        *,
        is_dummy: bool,
        is_batch_invariant: bool,
    ) -> None:
        self.config = self.local_config = implementation.read_config(fields)
        if implementation.split_config is not None:
            self.local_config = implementation.split_config(self.config, place)
        elif place.num_ranks > 1:
            what = self.config.architecture
            if what not in _NATIVE:
                what = f"your model-class, {what},"
            raise _not_shared(what, place)
        self._stored = read_stored_format(fields)
        whole = read_json(directory / "config.json")
        self._is_part = has_text_part(whole)
        self._stacked_hidden_size = (
            fields.positive_int("hidden_size") if has_stacked_experts(whole) else None
        )
        self._is_dummy = is_dummy
        self._is_batch_invariant = is_batch_invariant
        self._quantization = quantization
        self._directory = directory
        self._implementation = implementation

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None],
        ranks: Ranks | None = None,
    ) -> Decoder:
        if self._quantization is not None and device.type not in ("cpu", "cuda"):
            raise ModelError(
                f"quantization is {self._quantization.value}, which is supported only on cpu and"
                f" cuda; the device is {device}"
            )

        def build(weights: Weights) -> Decoder:
            return self._implementation.build(self.config, weights)

        if self._is_dummy:
            # Maps of other formats are drawn as plain numbers.
            stored = self._stored if isinstance(self._stored, Mxfp4Format) else None
            return draw_weights(
                *(build, dtype, device, self._quantization, ranks, stored),
                is_batch_invariant=self._is_batch_invariant,
            )
        return load_weights(
            self._directory,
            self.config.architecture,
            build,
            dtype,
            device,
            progress,
            self._quantization,
            ranks,
            self._stored,
            name_alone if self._is_part else lambda name: name,
            stacked_hidden_size=self._stacked_hidden_size,
            is_batch_invariant=self._is_batch_invariant,
        )


def open_model(
    directory: Path,
    model_class: str = "",
    quantization: Quantization | None = None,
    place: Place = ALONE,
    max_model_len: int | None = None,
    *,
    is_dummy: bool = False,
    is_batch_invariant: bool = False,
) -> ModelSource:
    """Find the implementation for a model directory, and read its config.

    Args:
        directory: A Hugging Face directory.
        model_class: The setting of that name.
        quantization: How to quantize the weights; None: not at all.
        place: Which part of the model to load.
        max_model_len: The longest sequence, in tokens; None: the model's longest. In a model with
            LongRoPE, a length above `original_max_position_embeddings` selects the long factors.
        is_dummy: Whether to draw random weights instead of reading them.
        is_batch_invariant: Whether, on a GPU, no bit of a row's result may depend on other rows.

    Raises:
        ModelError: A file or field is missing, malformed, or asks for something unsupported, or
            `model_class` cannot be imported.
    """
    whole = read_json(directory / "config.json")
    part = text_part(whole)
    fields = with_long_factors(part, max_model_len)
    if part is not whole:
        _log.info("serving only the model's text part", architecture=read_architecture(whole))
    if model_class and model_class != _TRANSFORMERS:
        implementation = _import_implementation(model_class)
        return _CheckpointSource(
            *(directory, fields, implementation, quantization, place),
            is_dummy=is_dummy,
            is_batch_invariant=is_batch_invariant,
        )
    architecture = read_architecture(fields)
    lacking: UnsupportedError | None = None
    if model_class != _TRANSFORMERS and architecture in _NATIVE:
        implementation = _NATIVE[architecture]
        check_mxfp4(fields)
        try:
            return _CheckpointSource(
                *(directory, fields, implementation, quantization, place),
                is_dummy=is_dummy,
                is_batch_invariant=is_batch_invariant,
            )
        except UnsupportedError as error:
            lacking = error
    try:
        source = _of_transformers(
            *(directory, fields, quantization, place, max_model_len), is_dummy=is_dummy
        )
    except ModelError as error:
        raise lacking or error from None
    if lacking is not None:
        _log.warning(
            "transformers runs the model, which is slower than our own code", reason=str(lacking)
        )
    return source


def _of_transformers(
    directory: Path,
    fields: JsonFields,
    quantization: Quantization | None,
    place: Place,
    max_model_len: int | None,
    *,
    is_dummy: bool,
) -> ModelSource:
    """Do as `open_model` does, with the implementation of transformers."""
    architecture = read_architecture(fields)
    if is_dummy:
        raise ModelError(
            f"load-format is dummy, which is supported only for {', '.join(_NATIVE)};"
            f" {architecture} is run by transformers"
        )
    check_dequantized(fields)
    if quantization is not None:
        raise ModelError(
            f"quantization is {quantization.value}, which is supported only for"
            f" {', '.join(_NATIVE)}; {architecture} is run by transformers"
        )
    if place.num_ranks > 1:
        raise _not_shared(f"{architecture}, which is run by transformers,", place)
    try:
        # Imported here, because the import takes seconds and few workers need it.
        from gpu_worker.models.transformers.model import TransformersSource  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise fields.error(
            "architectures",
            f"names {architecture}; without the package transformers, only"
            f" {', '.join(_NATIVE)} are supported; with it, most decoders are"
            " (pip install 'quire[transformers]')",
        ) from error
    return TransformersSource(directory, fields, max_model_len)


def _not_shared(what: str, place: Place) -> ModelError:
    flag, size = "tensor-parallel-size", place.tensor_size
    if size == 1:
        flag, size = "pipeline-parallel-size", place.pipeline_size
    return ModelError(
        f"{flag} is {size}; {what} runs on one device only; several are supported for"
        f" {', '.join(name for name, found in _NATIVE.items() if found.split_config)}"
    )


def _import_implementation(path: str) -> _Implementation:
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"model-class is {path!r}, read as package.module:Class; it cannot be imported: {error}"
        ) from error
    lacking = [name for name in ("read_config", "forward", "logits") if not hasattr(found, name)]
    if not isinstance(found, type) or lacking:
        what = f"has no {', '.join(lacking)}" if lacking else "is not a class"
        raise ModelError(f"model-class is {path!r}; it {what}")
    return _Implementation(found.read_config, found)  # type: ignore[attr-defined]
