"""Builds a model from the tensors of a Hugging Face directory.

Symbols: `N` output features of a linear map, `K` its input features.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeVar

import torch

from gpu_worker.ranks.collectives import Ranks
from gpu_worker.ranks.shards import ALONE
from gpu_worker.weights import gpu_linear
from gpu_worker.weights.checkpoint import Checkpoint
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.linear import Linear, make_linear
from gpu_worker.weights.packed_maps import PackedMaps
from gpu_worker.weights.quantized_linear import (
    Quantization,
    can_quantize,
    make_quantized_linear,
    quantize,
)
from gpu_worker.weights.read_ahead import ReadAhead
from gpu_worker.weights.stored.format import Mxfp4Format, StoredFormat
from gpu_worker.weights.tensor_file import Piece

ModelT = TypeVar("ModelT")
MapT = TypeVar("MapT", bound=Callable[[torch.Tensor], torch.Tensor])

_META = torch.device("meta")
_MAX_NAMES_SHOWN = 5
_DUMMY_STD = 0.02
"""Standard deviation of random weights. The value is usual, and keeps activations finite."""
_DUMMY_MXFP4_SCALE = 120
"""The code of the scale 2^-7. With this scale, evenly drawn MXFP4 numbers have about the standard
deviation `_DUMMY_STD`."""


class Weights:
    """A checkpoint's tensors, converted and put on a device when a model asks for them."""

    def __init__(
        self,
        names: AbstractSet[str],
        dtype: torch.dtype,
        device: torch.device,
        fill: Callable[[Piece, torch.Tensor], None],
        quantization: Quantization | None = None,
        ranks: Ranks | None = None,
        stored: StoredFormat | None = None,
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        """`fill` reads a piece into a tensor; `names` are those of all tensors in the checkpoint.

        `ranks` are the devices that share the model; None: this device only. `stored` is how the
        checkpoint packs its linear maps; None: it does not pack them. If `is_batch_invariant`, the
        maps that `linear` and `head` make compute the same bits for a token whatever the other
        tokens are.
        """
        self.names = names
        self.ranks = ranks
        self.place = ALONE if ranks is None else ranks.place
        """Which part of the model to build."""
        self.dtype = dtype
        """The dtype of all weights and activations."""
        self.device = device
        self.num_quantized = 0
        """The number of linear maps quantized so far."""
        self._quantization = quantization
        self._is_batch_invariant = is_batch_invariant
        self._fill = fill
        self._ignored: list[re.Pattern[str]] = []
        self.packed: PackedMaps | None = None
        """Reads the maps that the checkpoint packs; None: it packs none."""
        if stored is not None:
            self.packed = PackedMaps(stored, names, dtype, device, fill)
            self.ignore(self.packed.unused)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor of this shape, in the dtype of all weights unless `dtype` is given."""
        return self.part(Piece(name, shape), dtype)

    def dense_share(self, name: str, num_groups: int, size: int, num_in: int) -> torch.Tensor:
        """Return the part of a map's weight for this rank's outputs, `[N, K]`.

        This method is for a model that makes separate maps from parts of the weight. The result is
        not quantized: if the checkpoint packs the weight, it is unpacked and dequantized.

        Args:
            name: The map's name, without ".weight".
            num_groups: See `split_outputs`.
            size: See `split_outputs`.
            num_in: K.
        """
        rows = _slice(self.place.features(num_groups, size))
        piece = Piece(f"{name}.weight", (num_groups * size, num_in), (rows,))
        if self.packed is not None and self.packed.has(name):
            return self.packed.dense(piece)
        return self.part(piece)

    def rows(self, name: str, rows: range, *shape: int) -> torch.Tensor:
        """Return some rows of a tensor; `shape` is the shape of the whole tensor."""
        return self.part(Piece(name, shape, (_slice(rows),)))

    def part(self, piece: Piece, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a part of a tensor, in the dtype of all weights unless `dtype` is given."""
        out = torch.empty(piece.piece_shape, dtype=dtype or self.dtype, device=self.device)
        self._fill(piece, out)
        return out

    def linear(self, num_in: int, *parts: tuple[str, int], bias: bool = False) -> Linear:
        """Make a linear map, or fuse several with the same input by joining their outputs.

        The map is quantized if the worker's settings ask for it.

        Args:
            num_in: K.
            parts: Name (without ".weight" or ".bias") and N of each map.
            bias: Whether the maps have biases.
        """
        return self._linear([(name, (num_out, num_in), ()) for name, num_out in parts], bias=bias)

    def split_outputs(
        self, num_in: int, *parts: tuple[str, int, int], bias: bool = False
    ) -> Linear:
        """Do as `linear` does, with only this rank's share of each map's outputs.

        Args:
            num_in: K.
            parts: For each map: the name, the number of groups of outputs, and the size of a group.
                A group, such as a head, is never split; `Place.groups` says which groups this rank
                takes.
            bias: Whether the maps have biases.
        """
        shares = []
        for name, num_groups, size in parts:
            rows = _slice(self.place.features(num_groups, size))
            shares.append((name, (num_groups * size, num_in), (rows,)))
        return self._linear(shares, bias=bias)

    def split_fused(
        self, num_in: int, name: str, *parts: tuple[int, int], bias: bool = False
    ) -> Linear:
        """Do as `split_outputs` does, for maps that the checkpoint stores as one.

        Args:
            num_in: K.
            name: The fused map's name.
            parts: For each map: the number of groups of its outputs, and the size of a group; see
                `split_outputs`.
            bias: Whether the fused map has a bias.
        """
        shape = (sum(num_groups * size for num_groups, size in parts), num_in)
        if self.place.tensor_size == 1:
            return self._linear([(name, shape, ())], bias=bias)
        shares, start = [], 0
        for num_groups, size in parts:
            rows = _slice(self.place.features(num_groups, size, start))
            shares.append((name, shape, (rows,)))
            start += num_groups * size
        return self._linear(shares, bias=bias)

    def split_inputs(
        self, num_groups: int, size: int, part: tuple[str, int], *, bias: bool = False
    ) -> Linear:
        """Do as `linear` does, with only this rank's share of the inputs.

        A map sums over its inputs, so from its share of the inputs each rank computes only a part
        of that sum. Pass the map to `summed`, which makes a map that adds up the results of all
        ranks.

        Args:
            num_groups: Number of groups of inputs. A group, such as a head, is never split.
            size: Size of a group.
            part: Name and N of the map.
            bias: Whether the map has a bias; one rank adds it.
        """
        name, num_out = part
        columns = (slice(None), _slice(self.place.features(num_groups, size)))
        bias = bias and self.place.tensor_rank == 0
        return self._linear([(name, (num_out, num_groups * size), columns)], bias=bias)

    def summed(self, part: MapT) -> MapT | Linear:
        """Make a map that sums the ranks' results of `part`; with one rank, return `part`."""
        if self.ranks is None or self.place.tensor_size == 1:
            return part
        return self.ranks.summed(part)

    def joined(self, part: MapT, num_out: int) -> MapT | Linear:
        """Make a map that joins the ranks' results of `part`; with one rank, return `part`.

        `Place.vocabulary` says which of the `num_out` outputs a rank has.
        """
        if self.ranks is None or self.place.tensor_size == 1:
            return part
        return self.ranks.joined(part, num_out)

    def head(self, weight: torch.Tensor) -> Linear:
        """Make the map to the vocabulary from its weight `[V, E]`, which may be the embedding.

        If other maps are quantized, this map gets 8 bits, which has no measurable loss; 4 bits cost
        the shipped model 1.3 % of perplexity. With 16 bits, this map would be a large part of the
        bytes that a small model reads per step. The embedding itself is looked up, not multiplied,
        and stays as it is.
        """
        return self._map(weight, None, Quantization.INT8 if self._quantization else None)

    def split_head(
        self, name: str, vocab_size: int, num_in: int, tied: torch.Tensor | None = None
    ) -> Linear:
        """Make the map to the vocabulary; each rank computes some outputs, which are then joined.

        Args:
            name: The weight's name.
            vocab_size: V.
            num_in: E.
            tied: The embedding, if it is also the map's weight and this rank has it; else None.
        """
        rows = self.place.vocabulary(vocab_size)
        weight = (
            self.rows(name, rows, vocab_size, num_in)
            if tied is None
            else tied[rows.start : rows.stop]
        )
        return self.joined(self.head(weight), vocab_size)

    def _linear(
        self,
        parts: Sequence[tuple[str, tuple[int, int], tuple[slice, ...]]],
        *,
        bias: bool,
    ) -> Linear:
        """Make one fused map.

        A part is a map's name, the shape of its weight, and the slices of the weight to use.
        """
        joined_bias = None
        if bias:
            joined_bias = self._joined(
                [Piece(f"{name}.bias", shape[:1], where[:1]) for name, shape, where in parts]
            )
        pieces = [Piece(f"{name}.weight", shape, where) for name, shape, where in parts]
        if self.packed is not None and any(self.packed.has(name) for name, _, _ in parts):
            return self._of_any_batch(self.packed.linear(pieces, joined_bias))
        return self.of_weight(parts[0][0], self._joined(pieces), joined_bias)

    def of_weight(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Make a map of a weight `[N, K]` that the model has read; quantize it as `linear` does.

        `name` is the map's name in errors.
        """
        num_in = weight.shape[1]
        if self._quantization is not None and not can_quantize(num_in, self._quantization):
            raise ModelError(
                f"quantization is {self._quantization.value}; {name} has {num_in} input"
                " features, which must be a multiple of 32"
            )
        return self._map(weight, bias, self._quantization)

    def _map(
        self, weight: torch.Tensor, bias: torch.Tensor | None, quantization: Quantization | None
    ) -> Linear:
        if quantization is None:
            return self._of_any_batch(make_linear(weight, bias))
        self.num_quantized += 1
        if weight.is_meta:  # planning only
            return make_linear(weight, bias)
        linear = make_quantized_linear(quantize(weight, quantization), bias, self.dtype)
        return self._of_any_batch(linear)

    def _of_any_batch(self, linear: Linear) -> Linear:
        return (
            gpu_linear.batch_invariant(linear, self.dtype) if self._is_batch_invariant else linear
        )

    def ignore(self, pattern: str) -> None:
        """Accept unused tensors whose whole name matches a regular expression."""
        self._ignored.append(re.compile(pattern))

    def ignores(self, name: str) -> bool:
        """Whether an unused tensor of this name is accepted."""
        return any(pattern.fullmatch(name) for pattern in self._ignored)

    def _joined(self, parts: Sequence[Piece]) -> torch.Tensor:
        """Join pieces along their first dimension, in one allocation."""
        shapes = [part.piece_shape for part in parts]
        rows = [shape[0] for shape in shapes]
        out = torch.empty(sum(rows), *shapes[0][1:], dtype=self.dtype, device=self.device)
        for part, of_part in zip(parts, torch.split(out, rows), strict=True):
            self._fill(part, of_part)
        return out


def _slice(features: range) -> slice:
    return slice(features.start, features.stop)


def load_weights(
    directory: Path,
    architecture: str,
    build: Callable[[Weights], ModelT],
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
    quantization: Quantization | None = None,
    ranks: Ranks | None = None,
    stored: StoredFormat | None = None,
    rename: Callable[[str], str | None] = lambda name: name,
    *,
    stacked_hidden_size: int | None = None,
    is_batch_invariant: bool = False,
) -> ModelT:
    """Build a model with weights read from disk, converted to `dtype`, on `device`.

    The model is first built with empty tensors, on the meta device. This first build shows which
    tensors the model needs, so a wrong checkpoint is refused before gigabytes are read. With
    `ranks`, a second build on the meta device shows which pieces of these tensors this rank needs.
    The last build reads the weights. Linear maps are packed or quantized one at a time, so the last
    build needs memory for all weights and for a second copy of one linear map.

    Args:
        directory: Has the files that `Checkpoint` reads.
        architecture: The model's name in errors.
        build: Makes the model; must not read the values of the tensors.
        dtype: The dtype of weights and activations.
        device: Where to put the weights.
        progress: Called with the fraction of weights read, up to 1.
        quantization: How to quantize linear maps; None: they stay in `dtype`.
        ranks: The devices that share the model; each reads its part.
        stored: How the checkpoint packs its linear maps; None: it does not pack them.
        rename: See `Checkpoint`.
        stacked_hidden_size: See `Checkpoint`.
        is_batch_invariant: See `Weights`.

    Raises:
        ModelError: A file is missing or damaged; tensors are missing, unexpected or of wrong shape;
            or the model cannot be quantized.
    """
    checkpoint = Checkpoint(directory, rename, stacked_hidden_size)
    planned: list[Piece] = []

    def note(piece: Piece, _: torch.Tensor) -> None:
        planned.append(piece)

    plan = Weights(checkpoint.names, dtype, _META, note, quantization, None, stored)
    build(plan)
    if quantization is not None and not plan.num_quantized:
        raise ModelError(
            f"quantization is {quantization.value}; {architecture} makes no map with Weights.linear"
            " or Weights.head"
        )
    needed = {piece.name for piece in planned}
    missing = sorted(needed - checkpoint.names)
    if missing:
        raise ModelError(f"{directory} lacks {_some(missing)} of {architecture}")
    unused = sorted(checkpoint.names - needed)
    unexpected = [name for name in unused if not plan.ignores(name)]
    if unexpected:
        raise ModelError(f"{directory} has {_some(unexpected)}, unknown to {architecture}")
    # The first plan covers the whole model, so all ranks refuse the same checkpoints.
    if ranks is not None:
        planned.clear()
        build(Weights(checkpoint.names, dtype, _META, note, quantization, ranks, stored))
    total, num_read = sum(math.prod(piece.piece_shape) for piece in planned), 0

    def fill(piece: Piece, out: torch.Tensor) -> None:
        nonlocal num_read
        ahead.wait_for_next()
        checkpoint.read_into(piece, out)
        num_read += out.numel()
        progress(num_read / total)

    weights = Weights(
        *(checkpoint.names, dtype, device, fill, quantization, ranks, stored),
        is_batch_invariant=is_batch_invariant,
    )
    with ReadAhead(map(checkpoint.extent, planned)) as ahead:
        model = build(weights)
    if weights.packed is not None:
        weights.packed.log()
    return model


class _EveryName(AbstractSet[str]):
    """Takes the place of a checkpoint's names when weights are random: contains every name."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def draw_weights(
    build: Callable[[Weights], ModelT],
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
    ranks: Ranks | None = None,
    stored: Mxfp4Format | None = None,
    *,
    is_batch_invariant: bool = False,
) -> ModelT:
    """Do as `load_weights` does, without files: with random weights, drawn on the device.

    One-dimensional tensors, such as norms, are filled with ones. Ranks that have the same part of a
    tensor draw the same numbers for it.
    """
    generator = torch.Generator(device)

    def fill(piece: Piece, out: torch.Tensor) -> None:
        generator.manual_seed(zlib.crc32(f"{piece.name} {piece.where}".encode()))
        if len(piece.shape) == 1:
            out.fill_(1)
        elif out.dtype is torch.uint8:
            if piece.name.endswith("_scales"):
                out.fill_(_DUMMY_MXFP4_SCALE)
            else:
                out.random_(256, generator=generator)
        else:
            out.normal_(std=_DUMMY_STD, generator=generator)

    weights = Weights(
        *(_EveryName(), dtype, device, fill, quantization, ranks, stored),
        is_batch_invariant=is_batch_invariant,
    )
    model = build(weights)
    if weights.packed is not None:
        weights.packed.log()
    return model


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    more = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
