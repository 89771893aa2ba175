"""Loads a LoRA adapter in all ranks: each rank reads its part from its own machine's files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from gpu_worker.lora.adapter import Adapter
from gpu_worker.parallel.leader import Leader
from gpu_worker.parallel.link import Frame, Kind
from model_files.errors import ModelError

LoadOne: TypeAlias = Callable[[str, Path], Adapter]
"""Loads one rank's part of an adapter, from its name and directory."""


def load_on_all_ranks(leader: Leader, load_own: LoadOne) -> LoadOne:
    """Return a loader for rank 0 that loads each adapter in all ranks.

    The loader raises what `load_own` raises, ModelError or torch.OutOfMemoryError, also if another
    rank raises it. It raises ModelError if the ranks have read different contents. Called by one
    thread at a time.
    """

    def load(name: str, directory: Path) -> Adapter:
        wanted = {"name": name, "directory": str(directory)}
        leader.send(Frame(Kind.LOAD_ADAPTER, json.dumps(wanted).encode()))
        try:
            own = load_own(name, directory)
        finally:  # a later load must not get the answers to this one
            answers = leader.take_answers()
        for rank, content in sorted(answers.items()):
            answer = json.loads(content)
            if (problem := answer.get("problem")) is not None:
                text = f"rank {rank}: {problem}"
                raise torch.OutOfMemoryError(text) if answer["is_memory"] else ModelError(text)
            if answer["digest"] != own.id.digest.hex():
                raise ModelError(f"rank {rank} has read other contents from {directory}")
        return own

    return load


class FollowersLoader:
    """Loads adapters in a rank other than 0, and keeps the last one until `take` fetches it."""

    def __init__(self, load_own: LoadOne) -> None:
        self._load_own = load_own
        self._last: Adapter | None = None

    def answer(self, content: bytes) -> bytes:
        """Load the adapter that a LOAD_ADAPTER frame names; return the content of the answer.

        The answer is an ADAPTER frame.
        """
        wanted = json.loads(content)
        self._last = None
        try:
            adapter = self._load_own(wanted["name"], Path(wanted["directory"]))
        except (ModelError, torch.OutOfMemoryError) as error:
            is_memory = isinstance(error, torch.OutOfMemoryError)
            return json.dumps({"problem": str(error), "is_memory": is_memory}).encode()
        self._last = adapter
        return json.dumps({"digest": adapter.id.digest.hex()}).encode()

    def take(self) -> Adapter:
        """Return the adapter that `answer` loaded last, and forget it.

        Called when rank 0 has received the answers of all ranks.
        """
        adapter, self._last = self._last, None
        assert adapter is not None, "rank 0 adds only what it has loaded"
        return adapter
