"""A pytest plugin: the C kernels compiled for the kind of CPU that QUIRE_TEST_MARCH names.

QUIRE_TEST_MARCH=x86-64-v3 pytest -p tests.kernels.other_cpu tests/kernels/test_native_*.py
"""

import os

from kernels.cpu import build

MARCH = os.environ["QUIRE_TEST_MARCH"]
build._FLAGS = tuple(f"-march={MARCH}" if "-march" in flag else flag for flag in build._FLAGS)
