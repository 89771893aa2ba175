"""Loads the compiled kernels, once in a process, into the thread pool that torch computes with."""

import ctypes
import functools
import struct
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import torch

from kernels.cpu.build import BuildError, cache_directory, find_or_build

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""The numbers by which C knows a number format; what is not here runs in the twins."""
KV_FORMATS: Final = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""As C knows what a quantized cache holds; 0 is the dtype of the model."""

Field: TypeAlias = "float | str | Call"
"""Of a kernel's structure: a number, the name of one that is given for each run, or a call of the
same program, for the address of its structure."""

_FIELD_BYTES: Final = 8
_MAPS: Final = Path("/proc/self/maps")


class Kernel:
    """One C function, which takes a pointer to a structure of 8-byte fields."""

    def __init__(self, library: ctypes.CDLL, name: str, fields: str) -> None:
        """`fields` are struct's letters: q an integer, P a pointer, d a double."""
        function = getattr(library, f"quire_{name}")
        function.argtypes = (ctypes.c_char_p,)
        function.restype = None
        self._call: Callable[[bytes], None] = function
        self.share_address = _address(library, f"quire_{name}_share")
        """Of the function that does a share of the work."""
        self.count_address = _address(library, f"quire_{name}_count")
        """Of the function that says how many shares there should be."""
        self.pack = struct.Struct(f"@{fields}").pack
        """The structure as bytes; tensors as `data_ptr()`, None as 0."""

    def __call__(self, *fields: float) -> None:
        """Call it now; fields as for `pack`."""
        self._call(self.pack(*fields))


def _address(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel's call, to be made later."""

    kernel: Kernel
    fields: tuple[Field, ...]
    """As for `kernel.pack`; what they point to must live as long as this."""
    joins: bool = False
    """Whether it needs nothing of the call before but the same tokens."""


class Program:
    """Calls that run one after another without the threads' going to sleep in between."""

    def __init__(self, library: "Library", calls: Sequence[Call], num_apart: int) -> None:
        """What a call reads or writes is changed by no call earlier than `num_apart` after it.

        Not even by itself: a thread that has lost its core does late, and twice, what others did.

        Raises:
            ValueError: More than `num_apart` calls join one another: they would wait for ever.
            KeyError: A field is a call that is none of these.
        """
        num_joined = 0
        for call in calls:
            num_joined = num_joined + 1 if call.joins else 1
            if num_joined > num_apart:
                raise ValueError(
                    f"num_apart is {num_apart}; {num_joined} calls join one another, and it must "
                    "be no fewer"
                )
        self._run = library.run
        packed, starts, num_fields = [], [], 0
        places: defaultdict[str, list[int]] = defaultdict(list)
        of_calls: list[tuple[int, Call]] = []
        for call in calls:
            starts.append(num_fields)
            for place, field in enumerate(call.fields, num_fields):
                if isinstance(field, str):
                    places[field].append(place)
                elif isinstance(field, Call):
                    of_calls.append((place, field))
            numbers = (0 if isinstance(field, str | Call) else field for field in call.fields)
            packed.append(call.kernel.pack(*numbers))
            num_fields += len(call.fields)
        self._fields = np.frombuffer(bytearray(b"".join(packed)), dtype=np.int64)
        self._places = {name: np.array(where) for name, where in places.items()}
        self._given = dict.fromkeys(places, 0)
        address = self._fields.ctypes.data
        start_of = {id(call): start for call, start in zip(calls, starts, strict=True)}
        for place, named in of_calls:
            self._fields[place] = address + start_of[id(named)] * _FIELD_BYTES
        table = b"".join(
            struct.pack(
                "@PPPq",
                call.kernel.share_address,
                call.kernel.count_address,
                address + start * _FIELD_BYTES,
                call.joins,
            )
            for call, start in zip(calls, starts, strict=True)
        )
        self._table = ctypes.create_string_buffer(table, len(table))
        self._head = struct.pack("@Pqq", ctypes.addressof(self._table), len(calls), num_apart)

    def __call__(self, numbers: Mapping[str, int] | None = None) -> None:
        """Run it; what its calls point to is as they need it. One thread at a time does.

        `numbers` are the integers that fields name.
        """
        for name, before in self._given.items():
            number = (numbers or {})[name]
            if number != before:  # or the threads' caches keep the fields
                self._fields[self._places[name]] = self._given[name] = number
        self._run(self._head)


class Library:
    """The C functions; each field list mirrors the structure of the same name in `src`."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.rms_norm = Kernel(library, "rms_norm", "4q5P3qd")
        self.rotary = Kernel(library, "rotary", "5q6P5q")
        self.silu_mul = Kernel(library, "silu_mul", "3q2Pq")
        self.store_kv = Kernel(library, "store_kv", "5qP" + 2 * "q3P8q")
        self.gather = Kernel(library, "gather", "3q3P")
        self.suppress = Kernel(library, "suppress", "2q3P2q")
        self.draw = Kernel(library, "draw", "2q5Pq")
        self.attention = Kernel(library, "attention", "9q11P15q2d")
        self.merge_splits = Kernel(library, "merge_splits", "9q11P15q2d")
        """The second half of `attention`, by the same fields, where there are partial results."""
        self.linear = Kernel(library, "linear", "3q4P4qP2q")
        self.low_rank_down = Kernel(library, "low_rank_down", "P2q2P2q")
        self.low_rank_up = Kernel(library, "low_rank_up", "P2q3P4q")
        """After `low_rank_down`: the second half of what adapters add, to where it is wanted."""
        self.run: Callable[[bytes], None] = library.quire_run
        library.quire_run.argtypes = (ctypes.c_char_p,)
        library.quire_run.restype = None
        library.quire_has_linear.restype = ctypes.c_int64
        self.has_linear = bool(library.quire_has_linear())
        """Whether `linear` exists: it needs the CPU's own dot product of bfloat16."""
        self.quantized = Kernel(library, "quantized", "5q6Pq")
        library.quire_has_quantized.restype = ctypes.c_int64
        self.has_quantized = bool(library.quire_has_quantized())
        """Whether `quantized` exists; it needs the same, and more."""


@functools.cache
def native() -> Library | None:
    """The library, compiled now if it never was (seconds); None: the twins must serve.

    Why it is None is said once, in a warning.
    """
    try:
        path = find_or_build(cache_directory())
        _share_openmp()
        return Library(path)
    except (BuildError, OSError, AttributeError) as error:
        warnings.warn(
            f"CPU kernels run in plain torch, several times slower: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _share_openmp() -> None:
    """Give what is loaded next the OpenMP of torch: a second one would have threads of its own."""
    if not _MAPS.is_file():
        return
    for line in _MAPS.read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "omp" in (name := Path(path).name) and name.startswith(("libgomp", "libomp", "libiomp")):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return
