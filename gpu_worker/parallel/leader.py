"""Rank 0's side of the connections: accepts the other ranks, and sends them what to execute.

When a rank has died, a collective never returns: the thread that waits in it hangs, perhaps inside
a GPU's driver. So when a rank is lost, or fails at a step that other ranks have begun, this process
ends at once, and all other ranks end with it. The scheduler sees one lost worker.
"""

import json
import os
import queue
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import structlog

from gpu_worker.parallel.link import Frame, Kind, Link
from gpu_worker.parallel.member import LocalRanks, Member
from gpu_worker.settings import WorkerSettings
from model_files.errors import ModelError

_HELLO_S = 5.0
"""A connection that sends no hello within this time is closed, because it is not a rank's."""
_LOOK_S = 0.2
_SAY_S = 1.0

_log = structlog.get_logger()


class Leader:
    """Rank 0's connections to the other ranks.

    At most two threads may use a leader at once: one that executes steps, and one that loads
    adapters.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        """Listen, and start this machine's other ranks.

        Raises:
            ModelError: The master address is not this machine's, or the master port is taken.
        """
        address = (settings.master_addr, settings.master_port)
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server(address, family=family)
        except OSError as error:
            raise ModelError(
                f"master-addr is {address[0]}, master-port {address[1]}: {error}"
            ) from error
        port = self._listener.getsockname()[1]
        # The other ranks get the port on which this process really listens: the setting may be 0.
        self.member = Member(settings.model_copy(update={"master_port": port}))
        self._links: dict[int, Link] = {}
        self._answers: dict[int, queue.SimpleQueue[bytes]] = {}
        """What each rank has answered to the last LOAD_ADAPTER."""
        self._is_closing = False
        self._lock = threading.RLock()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._local = LocalRanks(self.member)

    def gather(self, report: Callable[[str, float | None], None], welcome: dict[str, int]) -> None:
        """Wait until all ranks are connected, and send them `welcome`.

        Args:
            report: Called repeatedly with a status that names the missing ranks. An error that
                `report` raises ends the wait.
            welcome: The port of the store by which ranks find each other.

        Raises:
            ModelError: A rank's settings differ from rank 0's, or a rank of this machine has ended.
        """
        others = range(1, self.member.place.num_ranks)
        self._listener.settimeout(_LOOK_S)
        while missing := [rank for rank in others if rank not in self._links]:
            report(f"waiting for ranks {', '.join(map(str, missing))}", None)
            self._local.check()
            try:
                connected, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._meet(Link(connected))
        self._answers = {rank: queue.SimpleQueue() for rank in self._links}
        for link in self._links.values():
            link.send(Frame(Kind.WELCOME, json.dumps(welcome).encode()))
        self._watcher.start()

    def send(self, frame: Frame) -> None:
        """Send a frame to all other ranks, without waiting for them."""
        try:
            for link in self._links.values():
                link.send(frame)
        except OSError as error:
            self.give_up(f"a rank is lost: {error}")

    def take_answers(self) -> dict[int, bytes]:
        """Wait until all other ranks have answered a LOAD_ADAPTER; return the answers by rank."""
        return {rank: answers.get() for rank, answers in self._answers.items()}

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
        for link in self._links.values():
            try:
                link.send(Frame(Kind.CLOSE))
            except OSError:
                _log.warning("a rank ended early")
        self._listener.close()
        self._local.end()

    def give_up(self, problem: str) -> NoReturn:
        """End this process; all other ranks then end, too. Call this only after `gather`."""
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_SAY_S)  # if a rank is lost, the watcher reports it
        with self._lock:  # so that `close` cannot begin before the process ends
            _log.error("the group of ranks ends", problem=problem)
            sys.stderr.write(f"quire-worker: {problem}\n")
            sys.stderr.flush()
            os._exit(1)

    def _meet(self, link: Link) -> None:
        """Accept a new connection if it is a rank's; otherwise close it."""
        try:
            link.set_timeout(_HELLO_S)
            hello = link.receive()
            rank = self.member.check(hello.content)
            link.set_timeout(None)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            link.close()
            return
        if rank in self._links:  # the rank was restarted
            self._links[rank].close()
        self._links[rank] = link

    def _watch(self) -> None:
        """Receive answers until a rank fails or is lost, then end all ranks."""
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while (problem := self._receive(selector.select()[0][0].data)) is None:
                pass
        with self._lock:
            if not self._is_closing:
                self.give_up(problem)

    def _receive(self, rank: int) -> str | None:
        """Receive a frame from a rank. Return why the rank has failed; None: it has not failed."""
        try:
            frame = self._links[rank].receive()
        except OSError:
            return f"rank {rank} is lost"
        if frame.kind is Kind.ADAPTER:
            self._answers[rank].put(frame.content)
            return None
        return f"rank {rank}: {frame.content.decode()}"
