"""Finds the implementation that runs a model directory: one of ours, transformers', the user's."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from gpu_worker.executor import Decoder
from gpu_worker.json_fields import JsonFields, ModelError, read_json
from gpu_worker.model_config import ModelConfig, read_architecture, refuse_quantized
from gpu_worker.models.llama import build_llama
from gpu_worker.models.llama_config import LLAMA_ARCHITECTURES, read_llama_config
from gpu_worker.models.neox import build_neox
from gpu_worker.models.neox_config import read_neox_config
from gpu_worker.models.quantized_linear import Quantization
from gpu_worker.weights import Weights, load_weights

_TRANSFORMERS: Final = "transformers"


class ModelSource(Protocol):
    """A model directory and how to load it."""

    @property
    def config(self) -> ModelConfig:
        """What is known of the model before its weights are read."""

    def load(
        self, dtype: torch.dtype, device: torch.device, progress: Callable[[float], None]
    ) -> Decoder:
        """Read the weights and build the model.

        Args:
            dtype: of weights and activations.
            device: where they go.
            progress: called with the fraction of weights read, growing up to 1.

        Raises:
            ModelError: the checkpoint is missing, damaged, or not one of this model.
        """


@dataclass(frozen=True, slots=True)
class _Family:
    """An implementation: two functions, or a class of the user's that has both."""

    read_config: Callable[[JsonFields], ModelConfig]
    build: Callable[[Any, Weights], Decoder]
    """Takes what `read_config` returned."""


_NATIVE: Final = {
    **dict.fromkeys(LLAMA_ARCHITECTURES, _Family(read_llama_config, build_llama)),
    "GPTNeoXForCausalLM": _Family(read_neox_config, build_neox),
}


class _CheckpointSource:
    """A model that is built from the tensors of its checkpoint."""

    def __init__(
        self,
        directory: Path,
        fields: JsonFields,
        family: _Family,
        quantization: Quantization | None,
    ) -> None:
        self.config = family.read_config(fields)
        self._quantization = quantization
        self._directory = directory
        self._family = family

    def load(
        self, dtype: torch.dtype, device: torch.device, progress: Callable[[float], None]
    ) -> Decoder:
        if self._quantization is not None and device.type != "cpu":
            raise ModelError(
                f"quantization is {self._quantization.value}; the device is {device}, and it is"
                " supported on cpu alone"
            )
        return load_weights(
            self._directory,
            self.config.architecture,
            lambda weights: self._family.build(self.config, weights),
            dtype,
            device,
            progress,
            self._quantization,
        )


def open_model(
    directory: Path, model_class: str = "", quantization: Quantization | None = None
) -> ModelSource:
    """Find what runs the model of a directory, and read its config.

    Args:
        directory: a Hugging Face directory.
        model_class: as the setting of that name.
        quantization: how the weights are to be kept; None: as the dtype says.

    Raises:
        ModelError: a file or field is missing, malformed, or asks for what is not supported, or
            there is no such class.
    """
    fields = read_json(directory / "config.json")
    if model_class and model_class != _TRANSFORMERS:
        return _CheckpointSource(directory, fields, _import_family(model_class), quantization)
    refuse_quantized(fields)
    architecture = read_architecture(fields)
    if model_class != _TRANSFORMERS and architecture in _NATIVE:
        return _CheckpointSource(directory, fields, _NATIVE[architecture], quantization)
    if quantization is not None:
        raise ModelError(
            f"quantization is {quantization.value}; {architecture} is run by transformers' model,"
            f" and it is supported for {', '.join(_NATIVE)}"
        )
    try:
        # Here, not above: it is not needed by every worker, and takes seconds.
        from gpu_worker.models.transformers_source import TransformersSource  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise fields.error(
            "architectures",
            f"names {architecture}; without the package transformers supported are"
            f" {', '.join(_NATIVE)}; with it (pip install 'quire[transformers]') most decoders",
        ) from error
    return TransformersSource(directory, fields)


def _import_family(path: str) -> _Family:
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"model-class is {path!r}, which is to be package.module:Class; it cannot be"
            f" imported: {error}"
        ) from error
    lacking = [name for name in ("read_config", "forward", "logits") if not hasattr(found, name)]
    if not isinstance(found, type) or lacking:
        what = f"has no {', '.join(lacking)}" if lacking else "is no class"
        raise ModelError(f"model-class is {path!r}; it {what}")
    return _Family(found.read_config, found)  # type: ignore[attr-defined]
