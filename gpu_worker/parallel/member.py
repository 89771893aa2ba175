"""A rank before it connects: its number, its settings, and the check of other ranks' settings.

Imports no torch, because ranks connect while torch is loading.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Final, Self

from gpu_worker.ranks.shards import Place
from gpu_worker.settings import WorkerSettings
from model_files.errors import ModelError

_ALIKE: Final = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "dtype",
    "quantization",
    "model_class",
    "num_blocks",
    "kv_cache_memory_gb",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "host_kv_codec",
    "kv_checksum",
)
"""Settings that must be equal on all ranks; otherwise the ranks compute nonsense or wait forever.
"""


@dataclass(frozen=True, slots=True)
class Member:
    """One of the ranks that share a model."""

    settings: WorkerSettings
    """The settings of the command that started this rank."""
    number: int = 0
    """The index of this process among those that the command starts. It determines the rank and the
    GPU."""

    @property
    def place(self) -> Place:
        """The part of the model that this rank holds."""
        return Place(
            self.settings.rank + self.number,
            self.settings.tensor_parallel_size,
            self.settings.pipeline_parallel_size,
        )

    def hello(self) -> bytes:
        """Return this rank's first message to rank 0."""
        return json.dumps({"rank": self.place.rank, "settings": self._alike()}).encode()

    def check(self, hello: bytes) -> int:
        """Check another member's `hello`; return its rank.

        Raises:
            ModelError: The other member's settings differ from this member's, or its rank is out
                of range.
            ValueError, KeyError, TypeError, AttributeError: `hello` was not made by `Member.hello`.
        """
        said: dict[str, Any] = json.loads(hello)
        rank, theirs = said["rank"], said["settings"]
        ours = self._alike()
        for name in ours:
            if theirs.get(name) != ours[name]:
                raise ModelError(
                    f"{name.replace('_', '-')} is {theirs.get(name)} at rank {rank}; it must be"
                    f" {ours[name]}, as at rank 0"
                )
        if not isinstance(rank, int) or not 0 < rank < self.place.num_ranks:
            raise ModelError(f"rank is {rank}; it must be from 1 to {self.place.num_ranks - 1}")
        return rank

    def _alike(self) -> dict[str, Any]:
        """Return what must be equal on all ranks."""
        alike = self.settings.model_dump(mode="json", include=set(_ALIKE))
        # Each machine may have the adapters' files elsewhere.
        return alike | {"lora": [name for name, _ in self.settings.adapter_directories]}

    def to_json(self) -> bytes:
        """Return this member as JSON; the rank's process reads it from its standard input."""
        settings = self.settings.model_dump(mode="json")
        return json.dumps({"settings": settings, "number": self.number}).encode()


def member_from_json(text: bytes) -> Member:
    """Parse the output of `Member.to_json`."""
    told = json.loads(text)
    return Member(WorkerSettings(**told["settings"]), told["number"])


def command() -> list[str]:
    """Return the command that runs a rank.

    The process reads a `Member`, as JSON, from its standard input, and ends when the input ends.
    """
    return [sys.executable, "-P", "-m", "gpu_worker.rank_process"]


_END_S = 5.0


class LocalRanks:
    """The processes of this machine's other ranks. A context manager that ends them."""

    def __init__(self, member: Member) -> None:
        """Start this machine's other ranks, if `member` has the number 0.

        Each process ends when its standard input ends, at the latest when this process ends.
        """
        self._processes = []
        num_local = member.settings.num_local_ranks if member.number == 0 else 0
        for number in range(1, num_local):
            process = subprocess.Popen(command(), stdin=subprocess.PIPE)  # noqa: S603 - our own
            self._processes.append(process)
            assert process.stdin is not None
            process.stdin.write(Member(member.settings, number).to_json() + b"\n")
            process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def check(self) -> None:
        """Raise ModelError if a process has ended."""
        for process in self._processes:
            if (code := process.poll()) is not None:
                raise ModelError(f"a rank on this machine ended with status {code}; see its log")

    def end(self) -> None:
        """End the processes that still run."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:  # it hangs in the device's driver
                process.kill()
                process.wait()
