"""Runs a rank other than 0. Run as a command, this file reads a `Member` from standard input."""

import os
import signal
import sys
import threading
from typing import Final, NoReturn

from gpu_worker.parallel.follower import Follower
from gpu_worker.parallel.member import LocalRanks, Member, member_from_json
from model_files.errors import ModelError
from rpc.observe import logs

_ONE_MACHINE: Final = ("127.0.0.1", "localhost", "::1")


def prepare_environment(master_addr: str) -> None:
    """Set environment variables that torch's libraries read on import, except those already set."""
    # Otherwise torch's threads spin between parallel regions, on cores that the router, the
    # scheduler and clients need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if master_addr in _ONE_MACHINE:  # so that ranks do not listen on the network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def run_rank(member: Member) -> NoReturn:
    """Run the rank. The process ends when rank 0 ends, or with status 1 if this rank fails."""
    settings = member.settings
    prepare_environment(settings.master_addr)
    logs.configure(settings.log_level, settings.log_format, f"worker rank {member.place.rank}")
    with LocalRanks(member):
        follower = Follower(member)
        for number in (signal.SIGINT, signal.SIGTERM):
            # Rank 0 may still have steps to finish, which need this rank.
            signal.signal(number, signal.SIG_IGN)
        try:
            from gpu_worker.loading.worker_model import load_rank  # noqa: PLC0415 - torch takes seconds

            executor, limits, loader = load_rank(member, follower.welcome)
            follower.follow(executor, limits, loader)
        except ModelError as error:
            follower.fail(str(error))
        except Exception as error:  # noqa: BLE001 - without this rank the others cannot continue
            follower.fail(repr(error))


def main() -> None:
    """Run the rank that standard input names, until rank 0 or the parent process ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent process handles them
        signal.signal(number, signal.SIG_IGN)
    member = member_from_json(sys.stdin.buffer.readline())
    _end_with_input()
    run_rank(member)


def _end_with_input() -> None:
    """End the process when its standard input ends, because then its parent has ended."""

    def wait() -> None:
        # Not a buffered read, because it would hold the buffer's lock, which Python's exit needs.
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="standard input", daemon=True).start()


if __name__ == "__main__":
    main()
