"""The computations with which `kernels.cpu.amx_choice` checks and times AMX.

They are linear maps with weights of each format, and attention.

Symbols: `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim, `N` positions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Final

import torch

from kernels.cpu.library import Library
from kernels.cpu.linear import PackedLinear, can_pack, pack, pack_integers
from kernels.cpu.ops import paged_attention_prefill

NUM_CHECKED_ROWS: Final = 100
NUM_PROMPT_TOKENS: Final = 512
_MAP_ERROR: Final = 1e-4
_ATTENTION_ERROR: Final = 2.0**-10
"""The allowed absolute error of attention, which rounds the results of softmax to bfloat16. It is
allowed in addition to the relative error. In the check, the largest error exceeded the allowed
relative error by 4e-4, both with AVX-512 and with AMX in an emulator."""
_CHECKED_HEADS: Final = ((9, 3, 64), (4, 1, 96), (20, 1, 128))
"""The shapes of attention that are checked: (query heads, kv heads, head dim)."""
_NUM_CHECKED_POSITIONS: Final = 570
"""How many KV positions attention reads in a check. The number is above the 512 positions of one
split (`kernels.cpu.fields`), and is not a multiple of the positions in a tile."""
_TIMED_MAP: Final = (4096, 2048)
"""Output and input features of the maps to time, which have 16 MiB of weights in bfloat16."""
_TIMED_GROUP: Final = 32
"""How many input features a group of 4-bit weights has in the maps to time."""
_TIMED_HEADS: Final = (32, 8, 128)
_NUM_TIMED_SEQS: Final = 8
"""The number of sequences for timing, with 16 MiB of KV in all. Each call of attention reads the
next sequence."""
_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class CheckedUse:
    """A computation whose result can be checked."""

    name: str
    compute: Callable[[int, int], torch.Tensor]
    """Computes the rows `[first, end)` of the result together, and returns them."""
    exact: torch.Tensor
    """The exact result: all NUM_CHECKED_ROWS rows, in float64."""
    absolute_error: float
    """The absolute error that is allowed in addition to the relative error."""


@dataclass(frozen=True, slots=True)
class TimedUse:
    """The two computations that are timed for one of the uses in `kernels.cpu.amx_choice.USES`."""

    compute_prompt: Callable[[], object]
    compute_token: Callable[[], object]


def make_checked(library: Library) -> Iterator[CheckedUse]:
    """Yield the computations to check. Their random inputs are the same in every call."""
    generator = torch.Generator().manual_seed(0)
    for name, apply, weight, bias in _maps(generator):
        x = torch.randn(NUM_CHECKED_ROWS, apply.num_in, generator=generator).bfloat16()
        exact = x.double() @ weight.T + bias.double()
        yield CheckedUse(name, _rows_of(apply, x), exact, _MAP_ERROR)
    for num_heads, num_kv_heads, head_dim in _CHECKED_HEADS:
        attention = _Attention.random(
            library, generator,
            (NUM_CHECKED_ROWS, num_heads, head_dim), (1, _NUM_CHECKED_POSITIONS, num_kv_heads),
        )  # fmt: skip
        name = f"attention of {num_heads} heads to {num_kv_heads} of {head_dim}"
        yield CheckedUse(name, attention, attention.exact(), _ATTENTION_ERROR)


def make_timed(library: Library) -> dict[str, TimedUse]:
    """Make the computations to time, keyed by the names in `kernels.cpu.amx_choice.USES`."""
    num_out, num_in = _TIMED_MAP
    ones = torch.ones(_TIMED_MAP, dtype=torch.int8)
    by_row = torch.ones(num_out, 1)
    by_group = torch.ones(num_out, num_in // _TIMED_GROUP)
    maps = {
        "bfloat16": pack(ones.bfloat16(), None),
        "int8": pack_integers(8, ones, by_row, None, None, torch.bfloat16),
        "int4": pack_integers(4, ones, by_group, by_group, None, torch.bfloat16),
    }
    uses = {name: _timed_map(apply) for name, apply in maps.items()}
    num_heads, num_kv_heads, head_dim = _TIMED_HEADS
    attention = _Attention.random(
        library, torch.Generator().manual_seed(0),
        (NUM_PROMPT_TOKENS, num_heads, head_dim),
        (_NUM_TIMED_SEQS, NUM_PROMPT_TOKENS, num_kv_heads),
    )  # fmt: skip
    seqs, last = cycle(range(_NUM_TIMED_SEQS)), NUM_PROMPT_TOKENS - 1
    uses["attention"] = TimedUse(
        compute_prompt=lambda: attention(0, last + 1, next(seqs)),
        compute_token=lambda: attention(last, last + 1, next(seqs)),
    )
    return uses


def _timed_map(apply: PackedLinear) -> TimedUse:
    prompt = torch.full((NUM_PROMPT_TOKENS, apply.num_in), 0.01, dtype=torch.bfloat16)
    return TimedUse(lambda: apply(prompt), lambda: apply(prompt[:1]))


def _rows_of(apply: PackedLinear, x: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    return lambda first, end: apply(x[first:end])


def _maps(
    generator: torch.Generator,
) -> Iterator[tuple[str, PackedLinear, torch.Tensor, torch.Tensor]]:
    """Yield (name, map, weight in float64, bias) for linear maps of each format."""
    for num_out, num_in in (96, 576), (40, 70), (33, 2048):
        weight = torch.randn(num_out, num_in, generator=generator).div_(num_in**0.5).bfloat16()
        assert can_pack(weight)
        bias = torch.randn(num_out, generator=generator).bfloat16()
        yield f"bfloat16 [{num_out}, {num_in}]", pack(weight, bias), weight.double(), bias
    for bits, group, num_out, num_in in (8, 576, 96, 576), (8, 16, 40, 128), (4, 32, 96, 576):
        most, shape = 2 ** (bits - 1), (num_out, num_in // group)
        values = torch.randint(-most, most, (num_out, num_in), generator=generator)
        scales = torch.rand(shape, generator=generator).div_(most * num_in**0.5).half().double()
        offsets = None
        weight = values * scales.repeat_interleave(group, 1)
        if bits == 4:  # noqa: PLR2004  4-bit weights have offsets, for values that begin at 0 in C
            offsets = torch.randn(shape, generator=generator).div_(num_in**0.5).half() + 8 * scales
            weight += offsets.repeat_interleave(group, 1)
        bias = torch.randn(num_out, generator=generator).bfloat16()
        apply = pack_integers(bits, values.to(torch.int8), scales, offsets, bias, torch.bfloat16)
        yield f"int{bits} [{num_out}, {num_in}] in groups of {group}", apply, weight, bias


@dataclass(frozen=True, slots=True)
class _Attention:
    """T query tokens that can attend to any sequence in `caches`, as the sequence's last tokens."""

    library: Library
    query: torch.Tensor
    """[T, H, D]."""
    caches: tuple[torch.Tensor, torch.Tensor]
    """Keys and values, each [blocks, _BLOCK_SIZE, HKV, D]: the blocks of each sequence in order."""
    num_positions: int
    """N, the number of positions of each sequence."""

    @classmethod
    def random(
        cls,
        library: Library,
        generator: torch.Generator,
        query_shape: tuple[int, int, int],  # T, H, D
        cache_shape: tuple[int, int, int],  # sequences, N, HKV
    ) -> "_Attention":
        num_seqs, num_positions, num_kv_heads = cache_shape
        num_blocks = num_seqs * -(-num_positions // _BLOCK_SIZE)
        shape = (num_blocks, _BLOCK_SIZE, num_kv_heads, query_shape[2])
        query, keys, values = (
            torch.randn(each, generator=generator).bfloat16()
            for each in (query_shape, shape, shape)
        )
        return cls(library, query, (keys, values), num_positions)

    def __call__(self, first: int, end: int, seq: int = 0) -> torch.Tensor:
        """Attend with the query tokens `[first, end)` to sequence `seq`; return the result."""
        num_blocks = -(-self.num_positions // _BLOCK_SIZE)
        table = torch.arange(seq * num_blocks, (seq + 1) * num_blocks, dtype=torch.int32)
        seq_len = self.num_positions - len(self.query) + end
        return paged_attention_prefill(
            self.library, self.query[first:end], *self.caches, table.view(1, -1),
            torch.tensor([seq_len], dtype=torch.int32),
            torch.tensor([0, end - first], dtype=torch.int32), end - first,
            self.query.shape[2] ** -0.5,
        )  # fmt: skip

    def exact(self) -> torch.Tensor:
        """Return the attention of all T query tokens to sequence 0, in float64."""
        num_tokens, num_heads, head_dim = self.query.shape
        keys, values = (
            cache.flatten(0, 1)[: self.num_positions]
            .double()
            .repeat_interleave(num_heads // cache.shape[2], 1)
            for cache in self.caches
        )
        scores = torch.einsum("thd,nhd->htn", self.query.double(), keys) * head_dim**-0.5
        position = torch.arange(self.num_positions)
        is_later = position > position[-num_tokens:].view(-1, 1)
        weights = scores.masked_fill(is_later, float("-inf")).softmax(-1)
        return torch.einsum("htn,nhd->thd", weights, values)
