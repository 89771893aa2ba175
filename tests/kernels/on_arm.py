"""A pytest plugin: the C kernels as compiled for ARM, each call run by QEMU.

QUIRE_TEST_CPU=armv8-a pytest -p tests.kernels.on_arm tests/kernels/test_native_rows.py

The name is a shipped target's. Only kernels that an op calls can run so, not a program of several:
QEMU's process has its own memory, so a call takes copies of all tensors whose address was asked for
since the call before.
"""

import ctypes
import os
import struct
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from kernels.cpu import build, library, weight_memory
from kernels.cpu.targets import SHIPPED_TARGETS

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
DRIVER = Path(__file__).parent / "arm_calls.c"
_NAME_BYTES = 64
_MAX_BYTES = 1 << 28
"""Of a call's tensors: some tests span far more, which would take minutes to copy."""


def compiled(target, directory):
    """Return the target's library in `directory`, after compiling it if it is not there."""
    build._COMPILERS = (COMPILER,)
    path = directory / build._file_name(target)
    return path if path.is_file() else build.build(directory, target)


class Emulated:
    """Stands for a loaded library: its attributes are functions."""

    def __init__(self, path):
        self._directory = tempfile.TemporaryDirectory()
        driver = Path(self._directory.name) / "driver"
        openmp = ["-Wl,--no-as-needed", "-lgomp"]  # which the library does not link
        subprocess.run([COMPILER, str(DRIVER), *openmp, "-o", str(driver)], check=True)
        libc = [COMPILER, "-print-file-name=libc.so.6"]
        libc = Path(subprocess.run(libc, check=True, capture_output=True, text=True).stdout.strip())
        self._process = subprocess.Popen(
            [EMULATOR, "-L", str(libc.parents[1]), str(driver), path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "2"},
        )

    def __getattr__(self, name):
        if name == "quire_use_amx":
            return Function(lambda _: False)
        return Function(lambda words: self._call(name, words))

    def _call(self, name, words):
        pieces = touched.pieces()
        assert sum(end - start for start, end in pieces) <= _MAX_BYTES, "leave out this test"
        to, answer = self._process.stdin, self._process.stdout
        to.write(name.encode().ljust(_NAME_BYTES, b"\0"))
        to.write(struct.pack("q", len(words) // 8) + words + struct.pack("q", len(pieces)))
        for start, end in pieces:
            to.write(struct.pack("qq", start, end - start) + ctypes.string_at(start, end - start))
        to.flush()
        for start, end in pieces:
            content = answer.read(end - start)
            assert len(content) == end - start, f"{name} ended QEMU: {self._process.wait()}"
            ctypes.memmove(start, content, len(content))


class Function:
    """A function whose types may be set, as those of ctypes."""

    argtypes = restype = None

    def __init__(self, call):
        self._call = call

    def __call__(self, *args):
        return self._call(*args)


class Touched:
    """The tensors whose address was asked for since the last call."""

    def __init__(self):
        self._tensors = []
        self._address_of = torch.Tensor.data_ptr

    def address_of(self, tensor):
        self._tensors.append(tensor)
        return self._address_of(tensor)

    def pieces(self):
        """Return the memory of the tensors, as pieces (start, end) that are apart; forget them."""
        pieces = []
        for tensor in self._tensors:
            start = self._address_of(tensor)
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in sizes)
            if tensor.numel() > 0:
                pieces.append((start, start + (last + 1) * tensor.itemsize))
        self._tensors = []
        pieces.sort()
        apart = pieces[:1]
        for start, end in pieces[1:]:
            if start < apart[-1][1]:
                apart[-1] = apart[-1][0], max(end, apart[-1][1])
            else:
                apart.append((start, end))
        return apart


touched = Touched()


def address_of(tensor):
    return touched.address_of(tensor)


torch.Tensor.data_ptr = address_of

TARGET = next(each for each in SHIPPED_TARGETS if each.name == os.environ["QUIRE_TEST_CPU"])
LIBRARY = build.Build(compiled(TARGET, build.cache_directory()), TARGET)
no_address = SimpleNamespace(value=None)
library.ctypes = SimpleNamespace(
    CDLL=Emulated,
    cast=lambda *_: no_address,
    c_char_p=None,
    c_void_p=None,
    c_int64=None,
    c_bool=None,
)
library.find_or_build = lambda: LIBRARY
library._share_openmp = lambda: None
weight_memory._REGION_BYTES = 0
