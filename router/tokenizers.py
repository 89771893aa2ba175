"""The tokenizer of the model that is served: that of the flags, or of what was loaded since."""

import asyncio
from pathlib import Path
from typing import Final

from router.tokenizer import Tokenizer, load_tokenizer

_FLAGS: Final = ""
"""Stands for the directory that the router's flags name."""


class Tokenizers:
    """One is in use; what reads another takes its time, and changes nothing."""

    def __init__(self, first: Tokenizer) -> None:
        """`first` is that of the flags."""
        self._directory_to_tokenizer = {_FLAGS: first}
        self.current = first
        """The one in use."""

    async def read(self, directory: str) -> None:
        """Have the tokenizer of a directory at hand; "" is the flags'.

        Raises FileNotFoundError, ValueError and OSError if there is none that can be read.
        """
        if directory not in self._directory_to_tokenizer:
            tokenizer = await asyncio.to_thread(load_tokenizer, Path(directory))
            self._directory_to_tokenizer[directory] = tokenizer

    def num_token_ids(self, directory: str) -> int:
        """How many token ids one can produce; it was read."""
        return len(self._directory_to_tokenizer[directory].table.pieces)

    def use(self, directory: str) -> None:
        """Use one from now on, which was read; the others are forgotten, but the flags'."""
        self.current = self._directory_to_tokenizer[directory]
        first = self._directory_to_tokenizer[_FLAGS]
        self._directory_to_tokenizer = {_FLAGS: first, directory: self.current}
