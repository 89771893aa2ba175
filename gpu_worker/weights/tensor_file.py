"""The interface of a checkpoint's files: named tensors, read whole or in part."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch


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


class TensorFile(Protocol):
    """One file, memory-mapped."""

    @property
    def path(self) -> Path:
        """The path, for errors."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""

    def tensor(self, piece: Piece) -> torch.Tensor:
        """A piece of a tensor that has the piece's shape; reads little more than the piece."""
