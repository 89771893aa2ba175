"""Starts another rank of a command that runs several; its standard input says which."""

import signal
import sys

from gpu_worker.parallel.follower import end_with_input, run_rank
from gpu_worker.parallel.member import member_from_json


def main() -> None:
    """Run it until rank 0 ends, or the command does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the command
        signal.signal(number, signal.SIG_IGN)
    member = member_from_json(sys.stdin.buffer.readline())
    end_with_input()
    run_rank(member)


if __name__ == "__main__":
    main()
