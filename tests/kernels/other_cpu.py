"""A pytest plugin: the C kernels as compiled for the CPU that QUIRE_TEST_CPU names.

QUIRE_TEST_CPU=x86-64-v3 pytest -p tests.kernels.other_cpu tests/kernels/test_native_*.py

The name is a shipped target's; or "amx": this CPU, with Intel's AMX emulated in plain C.
"""

import hashlib
import os
from pathlib import Path

from kernels.cpu import build, library
from kernels.cpu.targets import SHIPPED_TARGETS

CPU = os.environ["QUIRE_TEST_CPU"]

if CPU == "amx":
    HEADER = Path(__file__).parent / "amx_emulated.h"
    digest = hashlib.sha256(HEADER.read_bytes()).hexdigest()  # the name of the compiled library
    emulation = f'-DAMX_EMULATION="{HEADER}"', f"-DAMX_EMULATION_DIGEST={digest}"
    build._FLAGS = ("-O1", *build._FLAGS[1:], *emulation)  # compiles in half the time
    emulated = library.native()
    assert emulated is None or emulated.use_amx(-1), "all formats"
else:
    build.THIS_CPU = next(target for target in SHIPPED_TARGETS if target.name == CPU)
