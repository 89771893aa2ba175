"""Loads the compiled kernels, once in a process, into the thread pool that torch computes with."""

import ctypes
import functools
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from kernels.cpu.build import BuildError, cache_directory, find_or_build

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""The numbers by which C knows a number format; what is not here runs in the twins."""

_MAPS: Final = Path("/proc/self/maps")


class Kernel:
    """One C function, which takes a pointer to a structure of 8-byte fields."""

    def __init__(self, library: ctypes.CDLL, name: str, fields: str) -> None:
        """`fields` are struct's letters: q an integer, P a pointer, d a double."""
        self._call: Callable[[bytes], None] = getattr(library, f"quire_{name}")
        self._pack = struct.Struct(f"@{fields}").pack

    def __call__(self, *fields: float) -> None:
        """Call it; tensors travel as `data_ptr()`, None as 0."""
        self._call(self._pack(*fields))


class Library:
    """The C functions; each field list mirrors the structure of the same name in `src`."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name in ("rms_norm", "rotary", "silu_mul", "store_kv", "attention", "linear"):
            function = getattr(library, f"quire_{name}")
            function.argtypes = (ctypes.c_char_p,)
            function.restype = None
        self.rms_norm = Kernel(library, "rms_norm", "4q5P3qd")
        self.rotary = Kernel(library, "rotary", "5q6P5q")
        self.silu_mul = Kernel(library, "silu_mul", "3q2Pq")
        self.store_kv = Kernel(library, "store_kv", "5q5P10q")
        self.attention = Kernel(library, "attention", "8q8P9q2d")
        self.linear = Kernel(library, "linear", "3q4P3q")
        library.quire_has_linear.restype = ctypes.c_int64
        self.has_linear = bool(library.quire_has_linear())
        """Whether `linear` exists: it needs the CPU's own dot product of bfloat16."""


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
