"""The fields of C's structures as Python lists them, against the C sources."""

import re

import pytest

from kernels.cpu.build import SOURCES
from kernels.cpu.library import Kernel, native

STRUCTURE = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
DECLARATION = re.compile(r"(?:const )?(struct \w+|\w+)\s+(.+)", re.DOTALL)
STRUCTURE_OF = {"merge_splits": "attention"}  # the others are named after their kernel


def structures():
    """The text between the braces of each structure in the sources, by its name."""
    texts = [path.read_text() for path in sorted(SOURCES.iterdir())]
    plain = (re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL) for text in texts)
    return dict(pair for text in plain for pair in STRUCTURE.findall(text))


def fields(name, known, prefix=""):
    """The fields of a structure, written as `Kernel` takes them."""
    for declaration in filter(None, map(str.strip, known[name].split(";"))):
        kind, declared = DECLARATION.fullmatch(declaration).groups()
        for field in map(str.strip, declared.split(",")):
            if kind.startswith("struct ") and not field.startswith("*"):
                yield from fields(kind.removeprefix("struct "), known, f"{prefix}{field}.")
            elif field.startswith("*"):
                yield f"*{prefix}{field.removeprefix('*')}"
            else:
                yield {"double": ".", "int64_t": ""}[kind] + prefix + field


@pytest.mark.skipif(native() is None, reason="needs native code")
def test_python_knows_each_structure_field_by_field():
    known = structures()
    kernels = {name: each for name, each in vars(native()).items() if isinstance(each, Kernel)}
    assert len(kernels) == 18
    for name, kernel in kernels.items():
        assert list(kernel.fields) == list(fields(STRUCTURE_OF.get(name, name), known)), name
