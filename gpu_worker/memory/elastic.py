"""Memory that grows and shrinks at its end while its addresses stay: mapped by chunk.

A range of addresses is reserved once, for the most that there may ever be. Behind it memory is
mapped, and given back, chunk by chunk from its beginning. So views, and the pointers that captured
graphs have, are good for as long as what they are used for is within the present size.
"""

from typing import Protocol

import torch


class OutOfMemoryError(Exception):
    """There is no memory for the chunks that were to be mapped; none of them is. Says numbers."""


class Chunks(Protocol):
    """A reserved range of addresses, and what is mapped behind it, in chunks of one size."""

    chunk_bytes: int

    def map(self, first: int, count: int) -> None:
        """Map chunks [first, first + count), none of which is mapped; they are zero.

        Raises:
            OutOfMemoryError: None of them is mapped.
        """

    def unmap(self, first: int, count: int) -> None:
        """Give mapped chunks back. Their contents are lost; nothing may be using them."""

    def view(self) -> torch.Tensor:
        """uint8[N] over the whole range, of which chunk 0 is mapped; good until `close`."""

    def close(self) -> None:
        """Give up the range, of which nothing is mapped."""


class ElasticMemory:
    """The first `num_bytes` of a range. One thread calls everything here."""

    def __init__(self, chunks: Chunks, num_bytes: int) -> None:
        """Map `num_bytes`, at least 1, zeroed.

        Raises:
            OutOfMemoryError: They are not there; the range is given up.
        """
        self.num_bytes = num_bytes
        self._chunks = chunks
        try:
            chunks.map(0, self._num_chunks(num_bytes))
        except Exception:
            chunks.close()
            raise
        self.bytes = chunks.view()
        """uint8[N] over the whole range; behind `num_bytes` there is nothing to read or write."""

    def resize(self, num_bytes: int) -> None:
        """Have `num_bytes`, at least 1; what there is more than before is zero.

        On a GPU the device must have ended all work on what goes.

        Raises:
            OutOfMemoryError: They are not there; it is as before.
        """
        before, after = self._num_chunks(self.num_bytes), self._num_chunks(num_bytes)
        if after > before:
            self._chunks.map(before, after - before)
        elif after < before:
            self._chunks.unmap(after, before - after)
        # The last chunk of before may hold what was beyond the end.
        self.bytes[self.num_bytes : min(num_bytes, before * self._chunks.chunk_bytes)] = 0
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Give all of it back, the addresses too: no view may be used any more."""
        self._chunks.unmap(0, self._num_chunks(self.num_bytes))
        self._chunks.close()

    def _num_chunks(self, num_bytes: int) -> int:
        return -(-num_bytes // self._chunks.chunk_bytes)
