"""Fuzzing with Hypothesis and a kept corpus: targets, cases as files, short and long passes.

A case file is readable: a line for each byte string, in order. A line is a message in protobuf's
text format, or a Python bytes literal; "#" begins a comment.
"""

import ast
import contextlib
import faulthandler
import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"
Case: TypeAlias = tuple[bytes, ...]
"""The input of a target: one message, or the messages of a stream in order."""
Check: TypeAlias = Callable[[Case], None]
"""Feeds a case to the target; raises if the target misbehaves."""

_HANG_S = 60.0
"""After this time, the process prints a traceback and ends. Cases take milliseconds."""
_ANY_SPEED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
_ROUND = 100
"""Cases between two reads of the clock."""


@dataclass(frozen=True, slots=True)
class Target:
    """An entry point that takes byte strings, and a strategy that makes them."""

    name: str
    """Also the name of its folder in the corpus."""
    cases: st.SearchStrategy[Case]
    open: Callable[[], contextlib.AbstractContextManager[Check]]
    """Sets up the target; a failed check may leave it broken."""
    kind: type[Message] | None = None
    """The message type of most of its byte strings; None: no messages."""
    num_examples: int = 60
    """Cases of the short pass; fewer if a case is expensive."""

    def paths(self) -> list[Path]:
        """The files of its cases in the corpus."""
        return sorted((CORPUS / self.name).glob("*.case"))


# --- passes ---------------------------------------------------------------------------------------


def replay_corpus(target: Target) -> None:
    """Check every case of the corpus; a failure names its file."""
    with target.open() as check:
        for path in target.paths():
            try:
                check(read_case(path, target.kind))
            except Exception as error:
                error.add_note(f"case {path}")
                raise


def short_pass(target: Target) -> None:
    """Draw the same few cases each time; raise the check's error for the smallest failing case."""
    with target.open() as check:
        _draw(target, check, target.num_examples, derandomize=True)


@dataclass(frozen=True, slots=True)
class Found:
    """A failing case, shrunk, and the error of its check."""

    case: Case
    error: Exception


def long_pass(target: Target, until: float, seed: int) -> tuple[int, Found | None]:
    """Draw cases until a monotonic time or the first failure; return their number."""
    rng = random.Random(seed)
    num_cases = 0
    last: Case = ()
    with target.open() as check:

        def counted(case: Case) -> None:
            nonlocal num_cases, last
            num_cases += 1
            last = case
            faulthandler.dump_traceback_later(_HANG_S, exit=True)
            try:
                check(case)
            finally:
                faulthandler.cancel_dump_traceback_later()

        while time.monotonic() < until:
            try:
                _draw(target, counted, _ROUND, seed=rng.getrandbits(64))
            except Exception as error:  # noqa: BLE001 - a finding
                return num_cases, Found(last, error)  # Hypothesis ends with the smallest
    return num_cases, None


def _draw(
    target: Target,
    check: Check,
    max_examples: int,
    *,
    derandomize: bool = False,
    seed: int | None = None,
) -> None:
    @settings(
        max_examples=max_examples,
        derandomize=derandomize,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=_ANY_SPEED,
        report_multiple_bugs=False,
    )
    @given(target.cases)
    def run(case: Case) -> None:
        check(case)

    (run if seed is None else seeded(seed)(run))()


# --- cases as files -------------------------------------------------------------------------------


def read_case(path: Path, kind: type[Message] | None) -> Case:
    lines = (line.strip() for line in path.read_text("ascii").splitlines())
    return tuple(_parse(line, kind) for line in lines if line and not line.startswith("#"))


def write_case(target: Target, case: Case, comment: str) -> Path:
    """Add a case to the corpus; a person should then give the file a clear name."""
    digest = hashlib.sha256(repr(case).encode()).hexdigest()[:8]
    path = CORPUS / target.name / f"found-{digest}.case"
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
    """A message in text format if that loses nothing, else a bytes literal."""
    if kind is not None:
        with contextlib.suppress(DecodeError):
            text = text_format.MessageToString(kind.FromString(data), as_one_line=True)
            if text_format.Parse(text, kind()).SerializeToString() == data:
                return text or "{}"
    return repr(data)
