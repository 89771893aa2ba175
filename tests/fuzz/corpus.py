"""Cases as files that a person can read and write: a line for each byte string, in order.

A line is a message in protobuf's text format, or a Python bytes literal; "#" begins a comment.
"""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from tests.fuzz.target import Case, Target

FOLDER = Path(__file__).parent / "corpus"


def read_case(path: Path, kind: type[Message] | None) -> Case:
    lines = (line.strip() for line in path.read_text("ascii").splitlines())
    return tuple(_parse(line, kind) for line in lines if line and not line.startswith("#"))


def paths_of(target: Target) -> Iterator[Path]:
    """The files of a target's cases; each is a finding, or shows what a case looks like."""
    yield from sorted((FOLDER / target.name).glob("*.case"))


def write_case(target: Target, case: Case, comment: str) -> Path:
    """Add a case, unless it is there; under a name that is to be changed for a telling one."""
    digest = hashlib.sha256(repr(case).encode()).hexdigest()[:8]
    path = FOLDER / target.name / f"found-{digest}.case"
    path.parent.mkdir(parents=True, exist_ok=True)
    comments = [f"# {line}".encode("ascii", "replace").decode() for line in comment.splitlines()]
    path.write_text("\n".join([*comments, *(_text(part, target.kind) for part in case), ""]))
    return path


def _parse(line: str, kind: type[Message] | None) -> bytes:
    if line.startswith(("b'", 'b"')):
        literal = ast.literal_eval(line)
        assert isinstance(literal, bytes)
        return literal
    assert kind is not None, "only a target of messages has messages"
    return text_format.Parse("" if line == "{}" else line, kind()).SerializeToString()


def _text(data: bytes, kind: type[Message] | None) -> str:
    """A message in words, if nothing is lost thereby."""
    if kind is not None:
        try:
            message = kind.FromString(data)
        except DecodeError:
            return repr(data)
        text = text_format.MessageToString(message, as_one_line=True)
        if text_format.Parse(text, kind()).SerializeToString() == data:
            return text or "{}"
    return repr(data)
