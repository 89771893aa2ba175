"""LoRA adapters for `NativeDecoder`: calls that add the adapters' products to results of maps.

Symbols: `T` tokens, `K` input features of a map, `N` its output features, `R` rank of an adapter's
pair of maps, `G` groups of tokens, each with one adapter.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.library import Field, KernelCall, Library
from kernels.cpu.linear import PackedLinear

MAPS: Final = ("qkv", "attention_output", "gate_up", "down")
"""The maps of a layer to which adapters may add, in the order in which C numbers them."""

PackedPair: TypeAlias = tuple[PackedLinear, PackedLinear]
"""The two maps that an adapter adds to one map of the model: A, from K to R features, and B, from R
to N. B's weight is already multiplied by the adapter's scale. R is even."""


class NativeAdapter:
    """An adapter in the form that C reads: the addresses of its weights. It never changes."""

    def __init__(self, layers: Sequence[Mapping[str, PackedPair]]) -> None:
        """`layers` has the adapter's pairs for each layer, by the names in `MAPS`."""
        self._layers = tuple(layers)  # C reads them
        self._spans: list[torch.Tensor] = []
        self._table = np.zeros((len(layers) * len(MAPS), 4), np.int64)  # C's `low_rank`
        for index, layer in enumerate(layers):
            for name, (down, up) in layer.items():
                spans = _spans(up.panels)
                self._spans.append(spans)
                self._table[index * len(MAPS) + MAPS.index(name)] = (
                    down.panels.data_ptr(), up.panels.data_ptr(), spans.data_ptr(), down.num_out,
                )  # fmt: skip

    @property
    def max_ranks(self) -> int:
        """The largest rank R of the adapter's pairs."""
        return int(self._table[:, 3].max())

    @property
    def address(self) -> int:
        """The address of an array of C's structs `low_rank`.

        Each map of each layer has one struct. The structs are ordered by layer, and within a layer
        by the map's place in the tuple `MAPS`.
        """
        return self._table.ctypes.data


def _spans(panels: torch.Tensor) -> torch.Tensor:
    """Return, for each panel of B, the interval of ranks that contains all weights other than 0.

    A panel of B has 32 outputs. The result is int32[ceil(N / 32), 2]: the first pair of ranks in
    the interval, and the first pair after it. There are R / 2 pairs. If a map of the model consists
    of fused maps, as "qkv" does, an adapter has separate ranks for q, k and v. Then, for example,
    B's weights between the ranks of k and the outputs of q are zero.
    """
    is_used = panels.ne(0).flatten(2).any(2)  # [ceil(N / 32), R / 2]
    num_steps = is_used.shape[1]
    steps = torch.arange(num_steps)
    first = torch.where(is_used, steps, num_steps).amin(1)
    end = torch.where(is_used, steps + 1, 0).amax(1)
    return torch.stack((first.minimum(end), end), dim=1).to(torch.int32)


class RowAdapters:
    """The adapter of each token of a step, in the form that C reads."""

    def __init__(
        self, numbers: npt.NDArray[np.int64], adapters: Mapping[int, NativeAdapter]
    ) -> None:
        """Group the tokens by adapter.

        `numbers`, int64[T], has the number of each token's adapter, which is at least 0. A number
        that is not in `adapters` means that the token has no adapter.
        """
        num_tokens = len(numbers)
        self._places = np.argsort(numbers, kind="stable")
        ordered = numbers[self._places]
        firsts = np.flatnonzero(np.diff(ordered, prepend=-1))  # [G]
        used = [adapters.get(number) for number in ordered[firsts].tolist()]
        self._adapters = [adapter for adapter in used if adapter is not None]  # C reads them
        groups = np.empty((len(firsts), 3), np.int64)
        groups[:, 0] = firsts
        groups[:, 1] = [*firsts[1:], num_tokens] if num_tokens else []
        groups[:, 2] = [0 if adapter is None else adapter.address for adapter in used]
        places = self._places.ctypes.data if len(firsts) > 1 else 0
        self._table = np.array([num_tokens, len(firsts), places, *groups.flat], np.int64)
        self.num_tokens = num_tokens

    @property
    def max_ranks(self) -> int:
        """The largest rank R of the step's adapters."""
        return max((adapter.max_ranks for adapter in self._adapters), default=0)

    @property
    def address(self) -> int:
        """The address of C's `row_adapters`, a structure that lives as long as this object."""
        return self._table.ctypes.data


def low_rank_calls(
    library: Library,
    rows: Field,
    place: int,
    x: torch.Tensor,
    alone: torch.Tensor,
    ranks: torch.Tensor,
    out: torch.Tensor,
    *,
    is_gated: bool = False,
) -> Iterator[KernelCall]:
    """Yield the calls that add the products of `x` and the adapters to a map's results for `x`.

    The map's results are in `alone`, so the program must compute the map before these calls. The
    sums are written to `out`. All tensors are bfloat16. The numbers of a row must be adjacent in
    memory, but there may be gaps between rows.

    Args:
        library: The native code.
        rows: The address of the step's `RowAdapters`.
        place: The map's index among an adapter's maps: `layer * len(MAPS) + MAPS.index(name)`.
        x: [T, K], the input of the map.
        alone: [T, N], the results of the model's map without adapters.
        ranks: [T, R], memory for A x, where R is the largest rank of the step.
        out: [T, N], in other memory than `alone`.
        is_gated: If true, the sums are `[gate, up]`, and `silu(gate) * up` [T, N / 2] is written to
            `out` instead of the sums. The map's `PackedLinear.can_gate` must be true.
    """
    yield KernelCall(library.low_rank_down, (
        rows, place, x.shape[1], x.data_ptr(), ranks.data_ptr(), x.stride(0), ranks.stride(0),
    ), joins=True)  # fmt: skip
    yield KernelCall(library.low_rank_up, (
        rows, place, out.shape[1], alone.data_ptr(), ranks.data_ptr(), out.data_ptr(),
        alone.stride(0), ranks.stride(0), out.stride(0), is_gated,
    ))  # fmt: skip
