"""Runs a text through a model of transformers, layer by layer, and rounds each layer's linear maps.

By the time a layer's maps are rounded, all earlier layers are rounded. The maps are fitted to the
inputs that they get from these layers, and so compensate for part of these layers' errors.

Symbols: `S` samples, `T` tokens of a sample, `K` input features of a linear map.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from gpu_worker.quantize.rounding import RoundedWeight, round_for_inputs
from gpu_worker.weights.json_fields import ModelError

_MOST_CHARACTERS: Final = 16
"""Characters of text to read per token; few tokens have more."""
_ROUTERS: Final = ("gate", "router")
"""Names of the maps that choose experts. These maps are not rounded: they are small, and rounding
would change which experts are chosen."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How weights are rounded."""

    bits: int
    group_size: int
    """Input features that share a scale."""

    @property
    def per_word(self) -> int:
        """Integers in a word of 32 bits."""
        return 32 // self.bits


class _Stopped(Exception):  # noqa: N818 - not an error
    """Stops the model's run on each sample but the first, as soon as layer 0's input is known."""


def read_samples(path: Path, tokenizer: Any, num_samples: int, length: int) -> torch.Tensor:
    """Return the token ids of up to `num_samples` samples of a text, int64[S, length].

    The samples are spread evenly over the text.

    Raises:
        ModelError: The text cannot be read, or is shorter than one sample.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"calibrate is {path}; it cannot be read as text: {error}") from error
    part = max(1, len(text) // num_samples)
    if part < length * _MOST_CHARACTERS:  # a short text is used completely, sample after sample
        ids = tokenizer.encode(text, add_special_tokens=False)
        samples = [ids[at : at + length] for at in range(0, len(ids), length)]
    else:
        places = [text[at : at + length * _MOST_CHARACTERS] for at in range(0, len(text), part)]
        samples = [tokenizer.encode(place, add_special_tokens=False)[:length] for place in places]
    whole = [sample for sample in samples if len(sample) == length][:num_samples]
    if not whole:
        raise ModelError(
            f"calibrate is {path}, a text of {len(text)} characters; it must have at least one"
            f" sample of {length} tokens"
        )
    return torch.tensor(whole)


@torch.inference_mode()
def round_layers(
    model: nn.Module,
    samples: torch.Tensor | None,
    rounding: Rounding,
    progress: Callable[[int, int], None],
) -> Iterator[tuple[str, RoundedWeight]]:
    """Round all decoder layers' linear maps in place; yield each map's name and rounded weight.

    Args:
        model: A causal language model of transformers, in float32.
        samples: Token ids int64[S, T]; None: weights are rounded without regard to inputs.
        rounding: The parameters of rounding.
        progress: Called with the number of layers that are done, and the number of all layers.

    Raises:
        ModelError: The model has no list of layers; or a layer has all experts in one tensor; or
            the input features of a map are not a multiple of `rounding.group_size`; or its output
            features are not a multiple of `rounding.per_word`.
    """
    prefix, layers = _find_layers(model)
    _refuse(prefix, layers, rounding)
    inputs: list[torch.Tensor] = []
    arguments: dict[int, Mapping[str, Any]] = {}
    if samples is not None:
        inputs, arguments = _inputs_of_layers(model, layers, samples)
    for number, layer in enumerate(layers):
        progress(number, len(layers))
        maps = dict(_rounded_maps(layer))
        with _observed(maps) as products:
            _run(layer, inputs, arguments.get(number))
        for name, found in maps.items():
            rounded = round_for_inputs(
                found.weight, products[name], rounding.bits, rounding.group_size
            )
            found.weight.copy_(rounded.dequantized())
            yield f"{prefix}.{number}.{name}", rounded
        inputs = _run(layer, inputs, arguments.get(number))
    progress(len(layers), len(layers))


def _find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            return name, module  # the outermost comes first
    raise ModelError(f"{type(model).__name__} has no list of layers; it cannot be quantized")


def _rounded_maps(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, found in module.named_modules():
        if isinstance(found, nn.Linear) and name.rpartition(".")[2] not in _ROUTERS:
            yield name, found


def _refuse(prefix: str, layers: nn.ModuleList, rounding: Rounding) -> None:
    for name, parameter in layers.named_parameters():
        if parameter.dim() > 2:  # noqa: PLR2004
            raise ModelError(
                f"{prefix}.{name} has {parameter.dim()} dimensions, as experts in one tensor have;"
                " only maps with two dimensions can be quantized"
            )
    for name, found in _rounded_maps(layers):
        if found.in_features % rounding.group_size:
            raise ModelError(
                f"{prefix}.{name} has {found.in_features} input features; group-size is"
                f" {rounding.group_size}, which must divide them"
            )
        if found.out_features % rounding.per_word:
            raise ModelError(
                f"{prefix}.{name} has {found.out_features} outputs; at {rounding.bits} bits their"
                f" number must be a multiple of {rounding.per_word}"
            )


def _inputs_of_layers(
    model: nn.Module, layers: nn.ModuleList, samples: torch.Tensor
) -> tuple[list[torch.Tensor], dict[int, Mapping[str, Any]]]:
    """Return layer 0's input for each sample, and each layer's keyword arguments, by layer number.

    Keyword arguments, such as masks and angles, are the same for all samples, because all samples
    have the same length.
    """
    inputs: list[torch.Tensor] = []
    arguments: dict[int, Mapping[str, Any]] = {}

    def note(number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        arguments.setdefault(number, kwargs)
        if number == 0:
            inputs.append(args[0])
            if len(inputs) > 1:
                raise _Stopped

    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, number=number: note(number, args, kwargs), with_kwargs=True
        )
        for number, layer in enumerate(layers)
    ]
    try:
        for sample in samples:
            try:
                model(sample.unsqueeze(0), use_cache=False)
            except _Stopped:
                continue
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, arguments


@contextlib.contextmanager
def _observed(maps: Mapping[str, nn.Linear]) -> Iterator[dict[str, torch.Tensor]]:
    """While the `with` block runs, sum `x @ x.T` over the inputs x of each map.

    Yields the sums, float32[K, K], by the map's name.
    """
    sums = {name: torch.zeros(2 * (each.in_features,)) for name, each in maps.items()}

    def add(name: str, x: torch.Tensor) -> None:
        flat = x.flatten(0, -2)
        sums[name].addmm_(flat.t(), flat)

    hooks = [
        each.register_forward_pre_hook(lambda _, args, name=name: add(name, args[0]))
        for name, each in maps.items()
    ]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


def _run(
    layer: nn.Module, inputs: list[torch.Tensor], arguments: Mapping[str, Any] | None
) -> list[torch.Tensor]:
    outputs = (layer(x, **(arguments or {})) for x in inputs)
    return [out[0] if isinstance(out, tuple) else out for out in outputs]
