"""Entry point of a local rank other than 0; reads its number and settings from standard input."""

import signal
import sys

from gpu_worker.parallel.follower import end_with_input, run_rank
from gpu_worker.parallel.member import member_from_json


def main() -> None:
    """Run the rank until rank 0 or the parent process ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent process handles them
        signal.signal(number, signal.SIG_IGN)
    member = member_from_json(sys.stdin.buffer.readline())
    end_with_input()
    run_rank(member)


if __name__ == "__main__":
    main()
