"""Reads single experts from tensors that stack all experts of a layer, as in Qwen3-VL-MoE.

An expert has three linear *maps*: gate, up and down. One stacked tensor has the gate and up maps of
all experts, another tensor has the down maps.

Symbols: `X` experts, `E` hidden size, `I` intermediate size of an expert.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from gpu_worker.weights.tensor_file import Extent, Piece, TensorFile

_STACKED: Final = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(|_scale_inv)")
_BLOCK: Final = 128
"""In fp8 checkpoints, a block of this many inputs and as many outputs has one scale."""


@dataclass(frozen=True, slots=True)
class _Map:
    """One map of one expert, as a part of a stacked tensor."""

    place: Piece
    """The part of the stacked tensor that is this map. The part's shape is `[1, inputs, outputs]`
    if `is_transposed`, otherwise `[1, outputs, inputs]`."""
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.place.piece_shape[1:]
        return shape[::-1] if self.is_transposed else shape

    def cut(self, piece: Piece) -> Piece:
        """Return where a piece of the map is."""
        cuts = (*piece.where, slice(None), slice(None))[:2]
        expert, *whole = self.place.where
        sizes = self.place.shape[1:]
        where = [
            range(size)[of_map][of_piece]
            for size, of_map, of_piece in zip(
                sizes, whole, cuts[::-1] if self.is_transposed else cuts, strict=True
            )
        ]
        return replace(self.place, where=(expert, *(slice(r.start, r.stop) for r in where)))


class ExpertsFile:
    """A file in which each map of each expert appears as a separate tensor."""

    def __init__(self, file: TensorFile, hidden_size: int) -> None:
        """`hidden_size`, E, shows the order of a tensor's dimensions, which differs by checkpoint.

        A shape that fits both orders is read as `[X, outputs, inputs]`, as by `transformers`.
        """
        self._file = file
        self._hidden_size = hidden_size
        self._maps: dict[str, _Map] = {}
        self.names: list[str] = []
        for name in file.names:
            if (found := _STACKED.fullmatch(name)) is None:
                self.names.append(name)
            else:
                self._add(name, *found.groups())
        self.names += self._maps

    @property
    def path(self) -> Path:
        return self._file.path

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._maps.get(name)
        return self._file.shape(name) if found is None else found.shape

    def tensor(self, piece: Piece) -> torch.Tensor:
        found = self._maps.get(piece.name)
        if found is None:
            return self._file.tensor(piece)
        part = self._file.tensor(found.cut(piece))[0]
        return part.t() if found.is_transposed else part

    def extent(self, piece: Piece) -> Extent | None:
        found = self._maps.get(piece.name)
        return self._file.extent(piece if found is None else found.place)

    def _add(self, name: str, experts: str, maps: str, suffix: str) -> None:
        """Add the maps in a stacked tensor.

        The shape is `[X, 2 * I, E]` for gate and up, and `[X, E, I]` for down, or either shape with
        its last two dimensions swapped.
        """
        shape = self._file.shape(name)
        hidden = -(-self._hidden_size // _BLOCK) if suffix else self._hidden_size
        is_gate_up = maps == "gate_up"
        is_transposed = shape[2 if is_gate_up else 1] != hidden
        num_out = shape[2 if is_transposed else 1]
        outputs = {"down": slice(0, num_out)}
        if is_gate_up:
            outputs = {"gate": slice(0, num_out // 2), "up": slice(num_out // 2, num_out)}
        for index in range(shape[0]):
            for each, rows in outputs.items():
                cut = (slice(None), rows) if is_transposed else (rows, slice(None))
                place = Piece(name, shape, (slice(index, index + 1), *cut))
                self._maps[f"{experts}.{index}.{each}_proj.weight{suffix}"] = _Map(
                    place, is_transposed
                )
