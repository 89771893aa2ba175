"""The order between computing, storing to the host and loading from it, on a GPU.

Events keep it: neither the host nor, where it can be helped, what computes waits for the link.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CopyStreams:
    """A stream for stores, one for loads; the caller's current stream is the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._store = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._load = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stored_staging: torch.cuda.Event | None = None

    def begin_staging(self) -> None:
        """Let what is launched from here on come after the last `storing_staged` is done."""
        if self._stored_staging is not None:
            torch.cuda.current_stream().wait_event(self._stored_staging)

    @contextmanager
    def storing_staged(self) -> Iterator[None]:
        """Copies made within come after everything launched before; what follows does not wait."""
        self._store.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._store):
            yield
        self._stored_staging = self._store.record_event()

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Copies made within come after everything launched before, and before all that follows.

        What follows may overwrite the device blocks.
        """
        computing = torch.cuda.current_stream()
        self._store.wait_stream(computing)
        with torch.cuda.stream(self._store):
            yield
        computing.wait_stream(self._store)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Copies made within come after all work and stores before, and before `end_loading`."""
        self._load.wait_stream(torch.cuda.current_stream())
        self._load.wait_stream(self._store)
        with torch.cuda.stream(self._load):
            yield

    def end_loading(self) -> None:
        """Let everything launched from here on come after the loads."""
        torch.cuda.current_stream().wait_stream(self._load)

    def await_stores(self) -> None:
        """Wait until the host's memory holds what was stored."""
        self._store.synchronize()

    def synchronize(self) -> None:
        """Wait until all copies are done."""
        self._store.synchronize()
        self._load.synchronize()
