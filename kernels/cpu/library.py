"""Loads the compiled C kernels, once per process; the kernels run in torch's thread pool."""

import ctypes
import functools
import hashlib
import itertools
import struct
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch

from kernels.cpu.build import Build, BuildError, find_or_build

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""C's numbers for the dtypes that it supports. For all other dtypes, `kernels.ops` runs the
plain-torch twins (`kernels.reference`)."""
KV_FORMATS: Final = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""C's numbers for the dtypes of a quantized cache; 0 stands for a cache that is not quantized."""

Field: TypeAlias = "float | str | KernelCall"
"""A field of a kernel's C structure. Outside a `Program`, each field is a number. In a `Program`, a
field can also be a name, or another call of the same program (a `KernelCall`). A name stands for a
number that is given each time the program runs. A `KernelCall` stands for the address of the
structure of that call."""

_FIELD_BYTES: Final = 8
_MAPS: Final = Path("/proc/self/maps")


class Kernel:
    """One C function `quire_NAME`, which takes a pointer to a structure of 8-byte fields.

    Programs use two more functions of each kernel: `quire_NAME_count` returns into how many shares
    to cut the work of a call, and `quire_NAME_share` computes one share.
    """

    def __init__(self, library: ctypes.CDLL, name: str, fields: str) -> None:
        """`fields` lists the structure's fields in C's order; `*` marks a pointer, `.` a double.

        All other fields are int64. In place of a nested structure, its own fields are
        listed.
        """
        function = getattr(library, f"quire_{name}")
        function.argtypes = (ctypes.c_char_p,)
        function.restype = None
        self._call: Callable[[bytes], None] = function
        self.fields = tuple(fields.split())
        self.share_address = _address(library, f"quire_{name}_share")
        self.count_address = _address(library, f"quire_{name}_count")
        letters = "".join({"*": "P", ".": "d"}.get(field[0], "q") for field in self.fields)
        self.pack = struct.Struct(f"@{letters}").pack
        """Returns the structure as bytes; takes the fields in order, with 0 for NULL."""

    def __call__(self, *fields: Field) -> None:
        """Call the function now, with a number for each field."""
        self._call(self.pack(*fields))


def _address(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


class Library:
    """The C functions of one compiled library.

    The fields of each kernel are listed as in its C structure in `src`; a test compares both lists.
    """

    def __init__(self, build: Build) -> None:
        library = ctypes.CDLL(str(build.path))
        self.build = build
        self.digest = hashlib.sha256(build.path.read_bytes()).hexdigest()[:24]
        """A hash of the machine code. The results of two libraries with different hashes may differ
        in their last bits, because another compiler, or code for another CPU, may add in another
        order."""
        kernel = functools.partial(Kernel, library)
        self.rms_norm = kernel(
            "rms_norm",
            "type weight_type num_tokens num_heads width *x *residual *weight *out *total"
            " x_stride_t x_stride_h residual_stride_t .eps",
        )
        self.rotary = kernel(
            "rotary",
            "type num_tokens num_heads num_kv_heads head_dim half"
            " *query *key *cos_sin *positions *query_out *key_out"
            " query_stride_t query_stride_h key_stride_t key_stride_h cos_sin_stride",
        )
        self.silu_mul = kernel("silu_mul", "type num_tokens width *gate_up *out stride_t")
        self.tanh_gelu_mul = kernel("tanh_gelu_mul", "type num_tokens width *gate_up *out stride_t")
        self.clamped_swiglu = kernel(
            "clamped_swiglu", "type num_tokens width *gate_up *out stride_t .alpha .limit"
        )
        side = (
            "{0}.format *{0}.new *{0}.cache *{0}.scales {0}.stride_t {0}.stride_h"
            " {0}.cache_stride_b {0}.cache_stride_p {0}.cache_stride_h"
            " {0}.scale_stride_b {0}.scale_stride_p {0}.scale_stride_h"
        )
        self.store_kv = kernel(
            "store_kv",
            "elem_bytes num_tokens num_kv_heads head_dim block_size *slot_mapping"
            f" {side.format('key')} {side.format('value')}",
        )
        self.gather = kernel("gather", "num_rows row_bytes stride_bytes *x *rows *out")
        self.suppress = kernel(
            "suppress",
            "num_masks num_tokens *logits *places *admitted logits_stride admitted_stride",
        )
        self.draw = kernel(
            "draw",
            "num_draws num_tokens *logits *places *temperature *uniform *token_ids logits_stride",
        )
        self.selective_scan = kernel(
            "selective_scan",
            "type num_seqs num_tokens num_heads head_dim num_groups width a_width"
            " *x *dt *a *b *c *d *state *out *state_out",
        )
        self.delta_scan = kernel(
            "delta_scan",
            "type num_seqs num_tokens num_key_heads num_heads key_dim head_dim"
            " *q *k *v *g *beta *state *out *state_out .scale",
        )
        attention = (
            "type format num_seqs num_tokens num_heads num_kv_heads head_dim value_dim block_size"
            " window"
            " *query *key_cache *value_cache *key_scales *value_scales *block_tables *seq_lens"
            " *query_start_loc *sinks *out *partials query_stride_t query_stride_h"
            " key_stride_b key_stride_p key_stride_h value_stride_b value_stride_p value_stride_h"
            " key_scale_stride_b key_scale_stride_p key_scale_stride_h"
            " value_scale_stride_b value_scale_stride_p value_scale_stride_h"
            " table_stride .scale .softcap"
        )
        self.attention = kernel("attention", attention)
        self.merge_splits = kernel("merge_splits", attention)
        """Merges the partial results of an `attention` call that splits the positions of sequences.
        A `Program` calls `merge_splits` after `attention`, with the same fields. Outside a
        `Program`, `attention` merges the partial results itself."""
        linear = (
            "num_rows num_in num_out x_type kept out_type *x *weight *scales *offsets *bias *out"
            " group x_stride out_stride x_width is_gated is_low_rank"
            " *next.attention next.num_runs next.num_runs_after"
        )
        self.linear = kernel("linear", linear)
        of_map = " ".join(f"*map.{f[1:]}" if f[0] == "*" else f"map.{f}" for f in linear.split())
        self.linear_heads = kernel(
            "linear_heads", f"num_heads x_stride_h out_stride_h weight_bytes {of_map}"
        )
        self.low_rank_down = kernel(
            "low_rank_down", "*rows map num_in *x *ranks x_stride ranks_stride"
        )
        self.low_rank_up = kernel(
            "low_rank_up",
            "*rows map num_out *alone *ranks *out alone_stride ranks_stride out_stride is_gated",
        )
        self.first_touch = kernel("first_touch", "*memory num_panels panel_bytes")
        """If threads are pinned, writes zeros to new memory for the weight of a linear map. Each
        panel of the weight (32 output features) is written by the thread that will read the panel,
        so that the system puts the panel's pages near that thread."""
        self.run: Callable[[bytes], None] = library.quire_run
        library.quire_run.argtypes = (ctypes.c_char_p,)
        library.quire_run.restype = None
        self.use_amx: Callable[[int], bool] = library.quire_use_amx
        """Turns Intel's AMX on for the uses in a set of bits (`kernels.cpu.amx_choice.USES`), and
        off for all other uses. Returns whether AMX is on for any use, which is possible only on a
        CPU with AMX. No kernel may run during the call."""
        library.quire_use_amx.argtypes = (ctypes.c_int64,)
        library.quire_use_amx.restype = ctypes.c_bool
        self._pin_threads: Callable[[bytes, int], bool] = library.quire_pin_threads
        library.quire_pin_threads.argtypes = (ctypes.c_char_p, ctypes.c_int64)
        library.quire_pin_threads.restype = ctypes.c_bool

    def pin_threads(self, cpus: Sequence[int]) -> bool:
        """Run the i-th thread of each later kernel on the CPU `cpus[i]`.

        No kernel may run during this call. The first thread is the calling thread, which is pinned
        only while a kernel runs. A kernel that has more threads than there are `cpus` pins none;
        threads already pinned stay pinned. Returns whether the system can pin `len(cpus)` threads.
        """
        return self._pin_threads(struct.pack(f"@{len(cpus)}q", *cpus), len(cpus))


class KernelCall(NamedTuple):
    """A kernel's call in a program."""

    kernel: Kernel
    fields: tuple[Field, ...]
    """The fields in the order of `kernel.fields`. The memory behind pointers must live as long as
    the program."""
    joins: bool = False
    """Whether share i of the call's work (see `Kernel`) begins as soon as share i of the previous
    call is done. Otherwise the call begins when all earlier calls are done."""


class Program:
    """A sequence of calls that run one after another; the threads do not sleep in between."""

    def __init__(self, library: Library, calls: Sequence[KernelCall], num_apart: int) -> None:
        """Prepare the calls.

        A thread that has lost its CPU core can be late: it is still at one call while the other
        threads do its share of that call, and then the next calls. So memory that one call reads or
        writes may be overwritten only by calls that come at least `num_apart` calls later. No call
        may change its own inputs, because two threads may compute the same share.

        Raises:
            ValueError: More than `num_apart` calls in a row join one another (`KernelCall.joins`);
                the threads would wait for ever.
            KeyError: A field refers to a call that is not in `calls`.
        """
        num_joined = 0
        for call in calls:
            num_joined = num_joined + 1 if call.joins else 1
            if num_joined > num_apart:
                raise ValueError(
                    f"num_apart is {num_apart}; {num_joined} calls join one another, so it must be"
                    " at least that number"
                )
        self._run = library.run
        structures = b"".join(
            call.kernel.pack(*(0 if isinstance(x, str | KernelCall) else x for x in call.fields))
            for call in calls
        )
        self._fields = np.frombuffer(bytearray(structures), dtype=np.int64)
        starts = list(itertools.accumulate((len(call.fields) for call in calls), initial=0))
        addresses = [self._fields.ctypes.data + start * _FIELD_BYTES for start in starts]
        address_of = {id(call): address for call, address in zip(calls, addresses, strict=False)}
        places: defaultdict[str, list[int]] = defaultdict(list)
        for call, start in zip(calls, starts, strict=False):
            for place, field in enumerate(call.fields, start):
                if isinstance(field, str):
                    places[field].append(place)
                elif isinstance(field, KernelCall):
                    self._fields[place] = address_of[id(field)]
        self._places = {name: np.array(where) for name, where in places.items()}
        self._given = dict.fromkeys(places, 0)
        table = b"".join(
            struct.pack(
                "@PPPq", call.kernel.share_address, call.kernel.count_address, address, call.joins
            )
            for call, address in zip(calls, addresses, strict=False)
        )
        self._table = ctypes.create_string_buffer(table, len(table))
        self._head = struct.pack("@Pqq", ctypes.addressof(self._table), len(calls), num_apart)

    def __call__(self, numbers: Mapping[str, int] | None = None) -> None:
        """Run the program; only one thread at a time may call this.

        `numbers` has the number for each name among the calls' fields (see `Field`).
        """
        for name, before in self._given.items():
            number = (numbers or {})[name]
            if number != before:  # unchanged fields are not written, to stay in the threads' caches
                self._fields[self._places[name]] = self._given[name] = number
        self._run(self._head)


@functools.cache
def native() -> Library | None:
    """Return the library; the first call may take seconds, because it may compile the library.

    If the library cannot be compiled or loaded, return None; the first call warns of the reason.
    """
    try:
        build = find_or_build()
        _share_openmp()
        return Library(build)
    except (BuildError, OSError, AttributeError) as error:
        warnings.warn(
            f"CPU kernels run in plain torch, several times slower: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _share_openmp() -> None:
    """Make the library use torch's OpenMP, because a second OpenMP would start more threads."""
    if not _MAPS.is_file():
        return
    for line in _MAPS.read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "omp" in (name := Path(path).name) and name.startswith(("libgomp", "libomp", "libiomp")):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return
