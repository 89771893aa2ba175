"""Reads named tensors from the safetensors files of a Hugging Face directory, memory-mapped."""

import math
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.weights.json_fields import JsonFields, ModelError, read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

_ORDINARY: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Number formats that need no scales."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    where: tuple[slice, ...] = ()
    """Which part, by dimension; dimensions not listed are whole."""

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        cut = (len(range(n)[part]) for n, part in zip(self.shape, self.where, strict=False))
        return (*cut, *self.shape[len(self.where) :])


class Checkpoint:
    """The tensors of a model directory: one file, or several with an index."""

    def __init__(self, directory: Path) -> None:
        """Open all files; raises ModelError if one is missing or damaged."""
        self._name_to_file: dict[str, _File] = {}
        for path in _files(directory):
            file = _File(path)
            self._name_to_file |= dict.fromkeys(file.names, file)

    @property
    def names(self) -> AbstractSet[str]:
        """Names of all tensors."""
        return self._name_to_file.keys()

    def read_into(self, piece: Piece, out: torch.Tensor) -> None:
        """Copy a piece to `out`, converting dtype and device. Reads only that piece.

        Raises:
            ModelError: The tensor has another shape; or its dtype differs from `out`'s and one of
                them needs scales.
        """
        file = self._name_to_file[piece.name]
        shape = file.shape(piece.name)
        if shape != piece.shape and not math.prod(shape) == math.prod(piece.shape) == 1:
            raise ModelError(
                f"{file.path}: {piece.name} has shape {list(shape)}; "
                f"config.json makes it {list(piece.shape)}"
            )
        tensor = file.tensor(piece)
        if tensor.dtype is not out.dtype and not {tensor.dtype, out.dtype} <= _ORDINARY:
            raise ModelError(
                f"{file.path}: {piece.name} has dtype {tensor.dtype}; config.json makes it"
                f" {out.dtype}"
            )
        out.copy_(tensor.view(out.shape))


class _File:
    """One safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: Any  # its package types it wrongly
        try:
            self._handle = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
        self.names: list[str] = list(self._handle.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle.get_slice(name).get_shape())

    def tensor(self, piece: Piece) -> torch.Tensor:
        if piece.piece_shape == piece.shape:  # mapped, not copied
            whole: torch.Tensor = self._handle.get_tensor(piece.name)
            return whole
        part: torch.Tensor = self._handle.get_slice(piece.name)[piece.where]
        return part


def _files(directory: Path) -> list[Path]:
    if (directory / _INDEX).exists():
        weight_map = read_json(directory / _INDEX).nested("weight_map")
        return [directory / name for name in sorted(set(_shard_names(weight_map)))]
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    for name in _PICKLED:
        if (directory / name).exists():
            raise ModelError(
                f"{directory / name} is a pickle, which can run code as it loads; "
                "only safetensors is read: convert it"
            )
    raise ModelError(f"{directory} holds neither {_SINGLE} nor {_INDEX}")


def _shard_names(weight_map: JsonFields) -> Iterator[str]:
    for tensor, name in weight_map.values.items():
        # Only files beside the index: an index from a stranger must not point elsewhere.
        if not isinstance(name, str) or name != Path(name).name:
            raise weight_map.error(tensor, f"is {name!r}; it must be the name of a file beside it")
        yield name
