"""The interface of a checkpoint's files: named tensors, read whole or in part."""

import os
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

TensorSpec = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    where: tuple[slice, ...] = ()
    """The slice of each dimension; dimensions that are not listed are whole."""

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        cut = (len(range(n)[part]) for n, part in zip(self.shape, self.where, strict=False))
        return (*cut, *self.shape[len(self.where) :])


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive bytes of an open file."""

    path: Path
    descriptor: int
    bytes: range


class OpenFile:
    """A mapped file that is also kept open for reads. It is closed when this object is freed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return  # perhaps too many files are open; this one can still be mapped
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Read `num_bytes` bytes, from `start` on; return b"" if the file is not open."""
        return b"" if self._descriptor is None else os.pread(self._descriptor, num_bytes, start)

    def extent(self, tensor: range, piece: Piece) -> Extent | None:
        """Return where in the file a piece's rows are; None: the file is not open.

        `tensor` is the range of the file's bytes that the whole tensor takes.
        """
        if self._descriptor is None:
            return None
        if piece.where and piece.shape[0]:
            rows = range(piece.shape[0])[piece.where[0]]
            row_bytes = len(tensor) // piece.shape[0]
            tensor = tensor[rows.start * row_bytes : rows.stop * row_bytes]
        return Extent(self._path, self._descriptor, tensor)


class TensorFile(Protocol):
    """One file, memory-mapped."""

    @property
    def path(self) -> Path:
        """The path, for errors."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""

    def tensor(self, piece: Piece) -> torch.Tensor:
        """Return a piece, `[*piece.piece_shape]`; read little more than the piece.

        The tensor `piece.name` in the file must have the shape `piece.shape`.
        """

    def extent(self, piece: Piece) -> Extent | None:
        """Return a range of the file that includes all bytes of the piece; None: unknown."""
