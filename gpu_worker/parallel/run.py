"""Runs a rank other than 0, from its settings to its end with rank 0."""

import os
import signal
from typing import NoReturn

from gpu_worker.parallel.follower import Follower
from gpu_worker.parallel.group import Member
from gpu_worker.parallel.local_ranks import LocalRanks
from gpu_worker.weights.json_fields import ModelError
from rpc.observe import logs

_ONE_MACHINE = ("127.0.0.1", "localhost", "::1")


def prepare_environment(master_addr: str) -> None:
    """Set what torch's libraries read when they are loaded, where nobody else has set it."""
    # Between two parallel regions torch's threads would spin, and take the cores that router,
    # scheduler and clients need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if master_addr in _ONE_MACHINE:  # else the ranks would listen on the network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def run_rank(member: Member) -> NoReturn:
    """Run the rank; the process ends with rank 0, or with a status of 1 if this one fails."""
    settings = member.settings
    prepare_environment(settings.master_addr)
    logs.configure(settings.log_level, settings.log_format, f"worker rank {member.place.rank}")
    with LocalRanks(member):
        follower = Follower(member)
        for number in (signal.SIGINT, signal.SIGTERM):
            # Rank 0 may have steps to finish, and this one's part in them.
            signal.signal(number, signal.SIG_IGN)
        try:
            from gpu_worker.loading.assemble import load_rank  # noqa: PLC0415 - torch takes seconds

            executor, limits = load_rank(member, follower.welcome)
            follower.follow(executor, limits)
        except ModelError as error:
            follower.fail(str(error))
        except Exception as error:  # noqa: BLE001 - without this rank the others cannot go on
            follower.fail(repr(error))
