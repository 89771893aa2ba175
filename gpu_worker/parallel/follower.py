"""A rank other than 0: repeats rank 0's calls, and ends when rank 0 ends."""

import json
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from contract.errors import QuireError
from gpu_worker.parallel.link import Frame, Kind, Link
from gpu_worker.parallel.member import Member
from gpu_worker.service.step_wire import plan_of
from quire.v1 import worker_pb2

if TYPE_CHECKING:
    from contract.worker_limits import Limits
    from gpu_worker.lora.adapter import Adapter
    from gpu_worker.parallel.adapter_loading import FollowersLoader
    from gpu_worker.step.executor import Executor, LaunchedStep

_RETRY_S: Final = 0.5

_log = structlog.get_logger()


class Follower:
    """A rank's connection to rank 0, once rank 0 has accepted the rank."""

    def __init__(self, member: Member) -> None:
        """Connect as soon as rank 0 listens, and wait until all ranks are connected.

        The process ends if rank 0 ends during this wait, or refuses this rank.
        """
        self._link = _connect(member)
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """The adapters to load: contents of LOAD_ADAPTER frames."""
        self._loader: FollowersLoader | None = None
        self._added: queue.SimpleQueue[Adapter] = queue.SimpleQueue()
        """The adapters of the ADD_ADAPTER frames in `_frames`, in the same order."""
        try:
            self._link.send(Frame(Kind.HELLO, member.hello()))
            welcome = self._link.receive()
        except OSError as error:
            _end(f"rank 0 has not accepted rank {member.place.rank}: {error}")
        self.welcome: dict[str, int] = json.loads(welcome.content)
        """What rank 0 sends first: `store_port`, the port of the store by which ranks find each
        other."""
        threading.Thread(target=self._read, name="rank 0", daemon=True).start()

    def follow(self, executor: "Executor", limits: "Limits", loader: "FollowersLoader") -> NoReturn:
        """Repeat rank 0's calls of the executor. Never returns: the process ends with rank 0."""
        self._loader = loader
        threading.Thread(target=self._load, args=(loader,), name="adapters", daemon=True).start()
        executor.bind_thread()
        pending: deque[LaunchedStep] = deque()
        adapters = dict(limits.adapters)
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
                case Kind.ADD_ADAPTER:
                    adapter, number = self._added.get(), int(frame.content)
                    executor.add_adapter(number, adapter)
                    adapters[adapter.id] = number
                    limits = replace(limits, adapters=adapters.copy())
                case Kind.REMOVE_ADAPTER:
                    number = int(frame.content)
                    executor.remove_adapter(number)
                    adapters = {each: n for each, n in adapters.items() if n != number}
                    limits = replace(limits, adapters=adapters.copy())
                case _:
                    raise AssertionError(f"rank 0 has sent {frame.kind!r}")

    def fail(self, problem: str) -> NoReturn:
        """Send rank 0 the reason why this rank ends, and end the process."""
        try:
            self._link.send(Frame(Kind.FAILED, problem.encode()))
        except OSError:
            _log.warning("rank 0 has ended")
        _end(problem)

    def _load(self, loader: "FollowersLoader") -> None:
        """Load adapters one after another, while the main thread runs steps."""
        try:
            while True:
                answer = loader.answer(self._loads.get())
                self._link.send(Frame(Kind.ADAPTER, answer))
        except Exception as error:  # noqa: BLE001 - rank 0 waits for the answer
            self.fail(repr(error))

    def _read(self) -> None:
        """Receive rank 0's frames, even while this rank computes or waits for another rank."""
        while True:
            try:
                frame = self._link.receive()
            except OSError as error:
                _end(f"rank 0 is lost: {error}")
            if frame.kind is Kind.CLOSE:
                os._exit(0)  # exit without cleanup, because a collective may hang
            if frame.kind is Kind.LOAD_ADAPTER:
                self._loads.put(frame.content)
                continue
            if frame.kind is Kind.ADD_ADAPTER:
                # Taken now, because the next adapter may be loaded before this frame's turn.
                assert self._loader is not None, "the rank has loaded an adapter"
                self._added.put(self._loader.take())
            self._frames.put(frame)


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
