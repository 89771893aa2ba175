"""A rank other than 0: repeats rank 0's calls, and ends when rank 0 ends."""

import json
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from contract.errors import QuireError
from gpu_worker.parallel.link import Frame, Kind, Link
from gpu_worker.parallel.member import Member
from gpu_worker.service.step_wire import plan_of
from quire.v1 import worker_pb2

if TYPE_CHECKING:
    from contract.worker_limits import Limits
    from gpu_worker.step.executor import Executor, LaunchedStep
import signal

from gpu_worker.parallel.member import LocalRanks
from gpu_worker.weights.json_fields import ModelError
from rpc.observe import logs

_RETRY_S: Final = 0.5

_log = structlog.get_logger()


class Follower:
    """A rank's connection with rank 0, from rank 0's welcome on."""

    def __init__(self, member: Member) -> None:
        """Connect as soon as rank 0 listens, and wait until all ranks are connected.

        The process ends if rank 0 ends first, or refuses this rank.
        """
        self._link = _connect(member)
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        try:
            self._link.send(Frame(Kind.HELLO, member.hello()))
            welcome = self._link.receive()
        except OSError as error:
            _end(f"rank 0 has not accepted rank {member.place.rank}: {error}")
        self.welcome: dict[str, int] = json.loads(welcome.content)
        """How the ranks find each other."""
        threading.Thread(target=self._read, name="rank 0", daemon=True).start()

    def follow(self, executor: "Executor", limits: "Limits") -> NoReturn:
        """Repeat rank 0's calls of the executor. Never returns: the process ends with rank 0."""
        executor.bind_thread()
        pending: deque[LaunchedStep] = deque()
        while True:
            frame = self._frames.get()
            match frame.kind:
                case Kind.LAUNCH:
                    plan = plan_of(worker_pb2.StepBatch.FromString(frame.content), limits)
                    try:
                        pending.append(executor.launch(plan))
                    except (
                        QuireError
                    ) as error:  # rank 0 refuses the step, too, and reports the error
                        _log.debug("refused a step", error=str(error))
                case Kind.COLLECT:
                    executor.collect(pending.popleft())
                case Kind.RESET:
                    pending.clear()
                    executor.reset()
                case Kind.DISTRUST:
                    executor.distrust()
                case _:
                    raise AssertionError(f"rank 0 has sent {frame.kind!r}")

    def fail(self, problem: str) -> NoReturn:
        """Send rank 0 the reason why this rank ends, and end the process."""
        try:
            self._link.send(Frame(Kind.FAILED, problem.encode()))
        except OSError:
            _log.warning("rank 0 has ended")
        _end(problem)

    def _read(self) -> None:
        """Receive rank 0's frames, even while this rank computes or waits for another rank."""
        while True:
            try:
                frame = self._link.receive()
            except OSError as error:
                _end(f"rank 0 is lost: {error}")
            if frame.kind is Kind.CLOSE:
                os._exit(0)  # exit without cleanup, because a collective may hang
            self._frames.put(frame)


def end_with_input() -> None:
    """End the process when its standard input ends, because then its parent has ended."""

    def wait() -> None:
        # unbuffered, because Python's exit needs the buffer's lock
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="standard input", daemon=True).start()


def _connect(member: Member) -> Link:
    settings = member.settings
    is_told = False
    while True:
        try:
            return Link(socket.create_connection((settings.master_addr, settings.master_port)))
        except OSError as error:
            if not is_told:
                _log.info(
                    "waiting for rank 0",
                    address=f"{settings.master_addr}:{settings.master_port}",
                    error=str(error),
                )
                is_told = True
            time.sleep(_RETRY_S)


def _end(problem: str) -> NoReturn:
    _log.error("this rank ends", problem=problem)
    sys.stderr.write(f"quire-worker: {problem}\n")
    sys.stderr.flush()
    os._exit(1)


_ONE_MACHINE = ("127.0.0.1", "localhost", "::1")


def prepare_environment(master_addr: str) -> None:
    """Set environment variables that torch's libraries read on import, unless they are set."""
    # Otherwise torch's threads spin between parallel regions, on cores that router, scheduler and
    # clients need.
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

            executor, limits = load_rank(member, follower.welcome)
            follower.follow(executor, limits)
        except ModelError as error:
            follower.fail(str(error))
        except Exception as error:  # noqa: BLE001 - without this rank the others cannot continue
            follower.fail(repr(error))
