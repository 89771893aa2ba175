"""The processes of a command's other ranks: they end with it, however it ends."""

import subprocess
from typing import Self

from gpu_worker.parallel.group import Member, command
from gpu_worker.weights.json_fields import ModelError

_END_S = 5.0


class LocalRanks:
    """The processes of all members of a command but its first; a context that ends them."""

    def __init__(self, member: Member) -> None:
        """Start them, if `member` is the first.

        Each ends when its standard input does, which is when this process does.
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
        """Raise ModelError if one has ended."""
        for process in self._processes:
            if (code := process.poll()) is not None:
                raise ModelError(f"a rank of this machine has ended with {code}; it has said why")

    def end(self) -> None:
        """End those that have not ended."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:  # it hangs in the device's driver
                process.kill()
                process.wait()
