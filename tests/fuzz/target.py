"""What can be fuzzed: something that takes byte strings, and a strategy that makes them."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from google.protobuf.message import Message
from hypothesis import strategies as st

Case: TypeAlias = tuple[bytes, ...]
"""What a target is given, in order: one message, or those of a stream."""
Check: TypeAlias = Callable[[Case], None]
"""Feeds a case; raises whatever a well-behaved service would not."""


@dataclass(frozen=True, slots=True)
class Target:
    """One way in."""

    name: str
    """Also of its folder in the corpus."""
    cases: st.SearchStrategy[Case]
    open: Callable[[], contextlib.AbstractContextManager[Check]]
    """Set it up; what fails a check may leave it broken."""
    kind: type[Message] | None = None
    """What its byte strings mostly are; None: no messages."""
    num_examples: int = 60
    """Of the short pass: what it costs decides."""
