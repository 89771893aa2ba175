"""Reads named tensors from the files of a model directory, memory-mapped."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.weights.json_fields import JsonFields, ModelError, read_json
from gpu_worker.weights.stored.gguf_file import open_gguf_files
from gpu_worker.weights.stored.stacked_experts import ExpertsFile
from gpu_worker.weights.tensor_file import Extent, OpenFile, Piece, TensorFile

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = "pytorch_model.bin"
_PICKLED_INDEX = "pytorch_model.bin.index.json"

_ORDINARY: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Number formats that need no scales."""


class Checkpoint:
    """The tensors of a model directory, in one file or several: safetensors, pickles or GGUF."""

    def __init__(
        self,
        directory: Path,
        rename: Callable[[str], str | None] = lambda name: name,
        stacked_hidden_size: int | None = None,
    ) -> None:
        """Open all files; raises ModelError if one is missing or damaged.

        `rename` maps a tensor's name in its file to its name in this object; None leaves the tensor
        out. With `stacked_hidden_size`, the model's hidden size, a tensor that stacks experts
        appears as one tensor for each map of each expert (`ExpertsFile`).
        """
        self._name_to_file: dict[str, TensorFile] = {}
        self._name_in_file: dict[str, str] = {}
        files = _open_files(directory)
        if stacked_hidden_size is not None:
            files = [ExpertsFile(file, stacked_hidden_size) for file in files]
        for file in files:
            for in_file in file.names:
                if (name := rename(in_file)) is not None:
                    self._name_to_file[name], self._name_in_file[name] = file, in_file

    @property
    def names(self) -> AbstractSet[str]:
        """Names of all tensors."""
        return self._name_to_file.keys()

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor, memory-mapped if possible; callers must not write to it."""
        file, in_file = self._name_to_file[name], self._name_in_file[name]
        return file.tensor(Piece(in_file, file.shape(in_file)))

    def extent(self, piece: Piece) -> Extent | None:
        """Return where the bytes of a piece are; None: unknown."""
        name = self._name_in_file[piece.name]
        return self._name_to_file[piece.name].extent(replace(piece, name=name))

    def read_into(self, piece: Piece, out: torch.Tensor) -> None:
        """Copy a piece to `out`, converting dtype and device. Reads only that piece.

        Raises:
            ModelError: The tensor's shape is not `piece.shape`; the tensor has NaN; or its dtype is
                not that of `out`, and one of the two dtypes needs scales.
        """
        file = self._name_to_file[piece.name]
        piece = replace(piece, name=self._name_in_file[piece.name])
        shape = file.shape(piece.name)
        if shape != piece.shape and not math.prod(shape) == math.prod(piece.shape) == 1:
            raise ModelError(
                f"{file.path}: {piece.name} has shape {list(shape)}; "
                f"by config.json it must be {list(piece.shape)}"
            )
        tensor = file.tensor(piece)
        if tensor.dtype is not out.dtype and not {tensor.dtype, out.dtype} <= _ORDINARY:
            raise ModelError(
                f"{file.path}: {piece.name} has dtype {tensor.dtype}; by config.json it must be"
                f" {out.dtype}"
            )
        out.copy_(tensor.view(out.shape))
        if out.dtype in _ORDINARY and has_nan(out):
            raise ModelError(f"{file.path}: {piece.name} has NaN")


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether any number of `tensor` is NaN.

    The check takes 0.06 s per 10⁹ numbers in bfloat16, a sixtieth of the time of `isnan`, measured
    with one thread of an AMD EPYC (family 26, model 2).
    """
    # The sum is also NaN if numbers are inf and -inf.
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: Any  # the package's type hint is wrong
        try:
            self._handle = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
        self.names: list[str] = list(self._handle.keys())
        self._file = OpenFile(path)
        self._name_to_bytes = _read_places(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle.get_slice(name).get_shape())

    def tensor(self, piece: Piece) -> torch.Tensor:
        if piece.piece_shape == piece.shape:  # mapped, not copied
            whole: torch.Tensor = self._handle.get_tensor(piece.name)
            return whole
        part: torch.Tensor = self._handle.get_slice(piece.name)[piece.where]
        return part

    def extent(self, piece: Piece) -> Extent | None:
        place = self._name_to_bytes.get(piece.name)
        return None if place is None else self._file.extent(place, piece)


class _Pickled:
    """A file of `torch.save`, read without running any code in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Only zip files can be mapped; before version 1.6, torch wrote other files.
            tensors = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
        except Exception as error:  # a damaged pickle may raise anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ModelError(f"{path} cannot be read as tensors of torch: {reason}") from error
        if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
            raise ModelError(f"{path} must hold a dictionary of tensors")
        self._tensors: dict[str, torch.Tensor] = tensors
        self.names = list(tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, piece: Piece) -> torch.Tensor:
        return self._tensors[piece.name][piece.where]

    def extent(self, piece: Piece) -> None:
        """Return None: torch does not say where a tensor's bytes are."""


def _read_places(file: OpenFile) -> dict[str, range]:
    """Read where each tensor's bytes are in a file that the package safetensors has accepted.

    The format: https://huggingface.co/docs/safetensors/index#format.
    """
    start = 8 + int.from_bytes(file.read(0, 8), "little")
    fields: dict[str, Any] = json.loads(file.read(8, start - 8) or "{}")
    fields.pop("__metadata__", None)
    offsets = {name: tensor["data_offsets"] for name, tensor in fields.items()}
    return {name: range(start + first, start + stop) for name, (first, stop) in offsets.items()}


def _open_files(directory: Path) -> Sequence[TensorFile]:
    for open_file, single, index in (
        (_Safetensors, _SINGLE, _INDEX),
        (_Pickled, _PICKLED, _PICKLED_INDEX),
    ):
        if (directory / index).exists():
            shards = _shard_names(read_json(directory / index).nested("weight_map"))
            return [open_file(directory / name) for name in sorted(set(shards))]
        if (directory / single).exists():
            return [open_file(directory / single)]
    if gguf_files := open_gguf_files(directory):
        return gguf_files
    raise ModelError(f"{directory} holds neither {_SINGLE} nor {_INDEX}")


def _shard_names(weight_map: JsonFields) -> Iterator[str]:
    for tensor, name in weight_map.values.items():
        # Only files beside the index: an untrusted index must not point elsewhere.
        if not isinstance(name, str) or name != Path(name).name:
            raise weight_map.error(tensor, f"is {name!r}; it must be the name of a file beside it")
        yield name
