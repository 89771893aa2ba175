"""The tokenizer of the model that is served: that of the flags, or of what was loaded since."""

import asyncio
from pathlib import Path
from typing import Final

from router.text.tokenizer import Tokenizer, load_tokenizer

_FLAGS: Final = ""
"""Stands for the directory that the router's flags name."""


class Tokenizers:
    """One is in use; what reads another takes its time, and changes nothing."""

    def __init__(self, first: Tokenizer) -> None:
        """`first` is that of the flags."""
        self._directory_to_tokenizer = {_FLAGS: first}
        self._directory_to_read: dict[str, asyncio.Task[Tokenizer]] = {}
        """Those that are being read, or were when whoever waited for them left."""
        self.current = first
        """The one in use."""

    async def read(self, directory: str) -> None:
        """Have the tokenizer of a directory at hand; "" is the flags'.

        The reading goes on if the caller is cancelled: who calls again finds how far it is. Raises
        FileNotFoundError, or whatever else keeps it from being read.
        """
        if directory in self._directory_to_tokenizer:
            return
        read = self._directory_to_read.get(directory)
        if read is None:
            reading = asyncio.to_thread(load_tokenizer, Path(directory))
            read = self._directory_to_read[directory] = asyncio.create_task(reading)
        try:
            tokenizer = await asyncio.shield(read)
        except Exception:
            self._directory_to_read.pop(directory, None)  # it may be there next time
            raise
        self._directory_to_read.pop(directory, None)
        # Not before: `use` may have forgotten what was read since.
        self._directory_to_tokenizer[directory] = tokenizer

    def num_token_ids(self, directory: str) -> int:
        """How many token ids one can produce; it was read."""
        return len(self._directory_to_tokenizer[directory].table.pieces)

    def use(self, directory: str) -> None:
        """Use one from now on, which was read; the others are forgotten, but the flags'."""
        self.current = self._directory_to_tokenizer[directory]
        first = self._directory_to_tokenizer[_FLAGS]
        self._directory_to_tokenizer = {_FLAGS: first, directory: self.current}
        for other, read in list(self._directory_to_read.items()):
            if read.done():
                del self._directory_to_read[other]
