"""All workers as one scheduler: places requests, takes back a lost worker's, hands over."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import structlog

from contract.errors import QuireError, TooBusyError, UnavailableError
from contract.heartbeat import TICK_S
from contract.info import ModelInfo, WorkerInfo
from rpc.health.state import Health
from scheduler_svc.core.compact.defragment import DefragmentationReport
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.domain import (
    CancelSequences,
    Command,
    DefragmentBlocks,
    DropSource,
    SubmitRequest,
)
from scheduler_svc.observers.spans import SequenceSpans
from scheduler_svc.operations.adapter_use import AdapterUse, check_adapter
from scheduler_svc.operations.adapters import Adapters
from scheduler_svc.routers.fan_out import RouterStreams
from scheduler_svc.wire.router import finished_to_proto
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.placement import Placer
from scheduler_svc.workers.request_ends import end_with_error, num_live_seqs
from scheduler_svc.workers.roster import Roster
from scheduler_svc.workers.served_model import ServedModel
from scheduler_svc.workers.session import Session
from scheduler_svc.workers.stream import WorkerLink
from scheduler_svc.workers.unplaced import UnplacedRequests

_STALL_MARGIN_S = 5.0
_HAND_OVER_S = 2.0
"""Most that the steps in flight get to be answered, while every live request stands still."""
_REUNION_S = 2.0
"""How long requests of the scheduler before wait for every worker to be there: one has their KV."""
_MAX_LOSSES = 3
"""After so many in a row a request is taken for what its workers are lost of."""

log = structlog.get_logger()


class Fleet:
    """The engines of all workers. A router sees neither how many there are nor which are lost."""

    def __init__(
        self,
        *,
        streams: RouterStreams,
        spans: SequenceSpans,
        health: Health,
        max_waiting: int,
        step_timeout_s: float,
        placer: Placer,
    ) -> None:
        self.roster = Roster()
        """The workers."""
        self._streams = streams
        self._spans = spans
        self._health = health
        self._max_waiting = max_waiting
        self._step_timeout_s = step_timeout_s
        self._placer = placer
        self._unplaced = UnplacedRequests()
        self._adapter_use = AdapterUse(self.roster, self._unplaced)
        self.adapters = Adapters(
            self.roster, is_used=self._adapter_use.is_used, on_change=streams.tell_adapters
        )
        """The LoRA adapters that the workers hold."""
        self._served = ServedModel(self.roster)
        self._attached = asyncio.Event()
        self._is_reunion = True
        self._awaited: set[Engine] = set()
        """Those that have not been attached since the start, and are waited for."""
        self._draining_engines: asyncio.Queue[Engine] = asyncio.Queue()
        self._is_draining = False
        self._has_failed = False

    # --- for the routers ------------------------------------------------------------------------

    async def model(self) -> ModelInfo:
        """Wait until a worker is attached.

        Returns:
            The model, its length the least of the workers'.
        """
        while (model := self.model_now()) is None:
            self._attached.clear()
            await self._attached.wait()
        return model

    def model_now(self) -> ModelInfo | None:
        """Give the same, which changes as workers come, go and are resized; None: there is none."""
        models = [session.model() for session in self._sessions()]
        model = min(models, key=lambda model: model.max_model_len, default=None)
        return None if model is None else replace(model, adapters=self.adapters.offered)

    def submit(self, request: Request) -> None:
        """Take on a request. An engine may still refuse it, and tells its source.

        Raises:
            TooBusyError: As many sequences wait as are allowed to.
        """
        self._place(SubmitRequest(request))

    def cancel(self, source: SourceId, seq_keys: Sequence[SeqKey]) -> None:
        """End sequences early, wherever they are."""
        self._post_to_all(CancelSequences(source, seq_keys))
        finished = self._unplaced.cancel(source, seq_keys)
        self._streams.deliver(finished_to_proto(finished))

    def drop_source(self, source: SourceId) -> None:
        """End all sequences of a source that is gone."""
        self._post_to_all(DropSource(source))
        self._unplaced.drop_source(source)
        self._spans.drop_source(source)  # of those unplaced; the sessions drop theirs

    def router_left(self) -> None:
        """Learn that a router's stream has ended; it may submit what it had to it again."""
        self._adapter_use.expect()

    # --- for operators --------------------------------------------------------------------------

    async def defragment(self) -> Mapping[str, DefragmentationReport]:
        """Move the held blocks together at each worker that is attached; wait until it is done.

        Raises:
            UnavailableError: None is attached, or one is lost meanwhile.
        """
        loop = asyncio.get_running_loop()
        answers: dict[str, asyncio.Future[DefragmentationReport]] = {}
        for worker, session in self.roster.sessions.items():
            answers[worker] = loop.create_future()
            session.post(DefragmentBlocks(answers[worker]))
        if not answers:
            raise UnavailableError("no worker is attached")
        reports = await asyncio.gather(*answers.values())
        return dict(zip(answers, reports, strict=True))

    # --- how it is ------------------------------------------------------------------------------

    @property
    def num_unplaced_seqs(self) -> int:
        """Sequences that wait for a worker to be attached."""
        return self._unplaced.num_seqs

    @property
    def queue_room(self) -> int:
        """How many sequences may be submitted to the worker with most room, or wait for one."""
        sessions = [session for session in self._sessions() if not session.is_draining]
        if not sessions:
            return max(0, self._max_waiting - self._unplaced.num_seqs)
        loads = [session.placement_load() for session in sessions]
        return max(0, *(load.max_waiting - load.num_waiting for load in loads))

    @property
    def num_live_seqs(self) -> int:
        """Sequences that run or wait, at a worker or for one."""
        loads = [session.load() for session in self._sessions()]
        return self._unplaced.num_seqs + sum(load.num_running + load.num_waiting for load in loads)

    def describe_stall(self) -> str | None:
        """Say which step takes longer than any may; None: all is well."""
        for worker, age_s in self.roster.oldest_step_ages_s().items():
            # The link gives a worker up after as long; here its engine does not run any more.
            if age_s > self._step_timeout_s + _STALL_MARGIN_S:
                return f"worker {worker}: a step has been in flight for {age_s:.0f} s"
        return None

    # --- life -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait a moment for the workers that are added first: some may have KV of before."""
        asyncio.get_running_loop().call_later(_REUNION_S, self._await_no_more)
        self._show_health()

    def add(self, engine: Engine) -> None:
        """Take on an engine that is about to run, with this fleet as owner."""
        self.roster.add(engine)
        if self._is_reunion:
            self._awaited.add(engine)
        self._show_health()

    def remove(self, engine: Engine) -> None:
        """Let go of an engine that has no session and will not run any more."""
        self.roster.remove(engine)
        self._awaited.discard(engine)
        self._show_health()
        self.place_unplaced()  # what waited for this one alone

    def note_failure(self) -> None:
        """Learn that an engine has failed, whose session answers no step any more."""
        self._has_failed = True

    async def watch(self) -> None:
        """Say when workers begin to hang, and when they go on."""
        hanging: set[str] = set()
        while True:
            await asyncio.sleep(TICK_S)
            before, hanging = hanging, set()
            for worker, session in self.roster.sessions.items():
                if trouble := session.trouble():
                    hanging.add(worker)
                    if worker not in before:
                        log.warning("worker hangs", worker=worker, how=trouble)
            if hanging != before:
                self._show_health()

    async def drain(self) -> None:
        """Let the steps in flight be answered, plan no more, and end the routers' streams.

        A router has a record of each live request, and submits it to the next scheduler. To finish
        them here would keep the workers, and the next scheduler waiting, as long as the longest
        takes.
        """
        self._is_draining = True
        sessions = [] if self._has_failed else self._sessions()
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                await asyncio.gather(*(session.hand_over() for session in sessions))
        except TimeoutError:
            log.warning("steps in flight are not waited for any longer", waited_s=_HAND_OVER_S)
        finally:
            self._streams.end_all(UnavailableError("the scheduler is shutting down"))

    # --- for the engines (EngineOwner) ----------------------------------------------------------

    def accept(self, engine: Engine, info: WorkerInfo) -> None:
        """Check that a worker has the model that the routers were told of, or tell them anew."""
        if self._served.accept(engine, info):
            self._begin_anew(f"the service now has another model, {info.model.id!r}")

    async def settle(self, engine: Engine, link: WorkerLink) -> None:
        """Have the worker hold the adapters that the others hold, and they its."""
        await self.adapters.settle(engine.target, link, link.info.model.adapters)
        self.accept(engine, link.info)  # another may have come meanwhile, with another model

    def attached(self, engine: Engine) -> None:
        """Place what waited for a worker."""
        if len(self._sessions()) == 1:  # routers that waited for one come now
            self._adapter_use.expect()
        self._attached.set()
        self._awaited.discard(engine)
        self._show_health()
        self.place_unplaced()

    def _await_no_more(self) -> None:
        """Place what waited for workers that do not come."""
        self._is_reunion = False
        self._awaited.clear()
        self.place_unplaced()

    def place_unplaced(self) -> None:
        """Place what waited for a worker that takes requests, now that one does."""
        for command in self._unplaced.take_all():
            try:
                check_adapter(command.request, self.adapters.held)
                self._place(command)
            except QuireError as error:
                self._streams.refuse(command.request, error)

    def draining(self, engine: Engine) -> None:
        """Place nothing more there, and have somebody empty it: see `next_draining`."""
        self._draining_engines.put_nowait(engine)

    async def next_draining(self) -> Engine:
        """Wait for a worker that is about to end, each once."""
        return await self._draining_engines.get()

    def unavailable(self, engine: Engine) -> None:  # noqa: ARG002
        """Say what is missing."""
        self._show_health()

    def lost(self, engine: Engine, commands: tuple[SubmitRequest, ...]) -> None:
        """Place a lost worker's requests anew, or keep them until it, or another, is there.

        One that ran at each of the last workers lost, and gained nothing there, ends: it may well
        be what they are lost of, and would take those beside it down again and again.
        """
        for command in commands:
            if command.num_losses < _MAX_LOSSES:
                self._place(command)
            else:
                self._fail(command, engine)

    # --- parts ----------------------------------------------------------------------------------

    def _place(self, command: SubmitRequest) -> None:
        """Post a request to the engine where it goes best, or keep it if none is there.

        Raises:
            TooBusyError: There is no room; never for one that was accepted before.
        """
        if self._is_draining:
            return  # its router submits it to the next scheduler
        can_refuse = not command.was_accepted
        n = num_live_seqs(command.request)
        sessions = [session for session in self._sessions() if not session.is_draining]
        if not sessions:
            if can_refuse and self._unplaced.num_seqs + n > self._max_waiting:
                raise self._too_busy(self._unplaced.num_seqs, n)
            self._unplaced.add(command)
            return
        num_held_tokens = [session.num_held_tokens(command.request) for session in sessions]
        if most := max(num_held_tokens):  # it may have moved, and left something behind
            sessions[num_held_tokens.index(most)].post(command)
            return
        if self._awaited and command.request.outputs:
            self._unplaced.add(command)  # its KV may be at a worker that is not attached yet
            return
        sessions = [each for each in sessions if each.trouble() is None] or sessions
        choice = self._placer.choose(command.request, sessions, can_refuse=can_refuse)
        if choice is None:
            loads = [session.placement_load() for session in sessions]
            raise self._too_busy(min(load.num_waiting for load in loads), n)
        sessions[choice.index].post(command, choice.num_tokens)

    def _begin_anew(self, why: str) -> None:
        """End what was asked of another model, and let the routers ask what this one is."""
        for command in self._unplaced.take_all():
            self._end_with_error(command.request, why)
        self._streams.kept.forget_all()
        self.adapters.forget()
        self._streams.end_all(UnavailableError(why))

    def _fail(self, command: SubmitRequest, engine: Engine) -> None:
        request = command.request
        error = (
            f"its worker was lost {command.num_losses} times in a row while it ran, "
            f"and it gained no token in between: {engine.loss}"
        )
        log.error(
            "a request is given up", request_id=request.request_id, num_losses=command.num_losses
        )
        self._end_with_error(request, error)

    def _end_with_error(self, request: Request, error: str) -> None:
        finished = end_with_error(request, error)
        for item in finished:
            self._spans.finished(item)
        self._streams.deliver(finished_to_proto(finished))

    def _too_busy(self, num_waiting: int, n: int) -> TooBusyError:
        return TooBusyError(
            f"the queue is full: {num_waiting} sequences wait, and this request has {n} more; "
            f"the limit is {self._max_waiting} (--max-waiting)"
        )

    def _post_to_all(self, command: Command) -> None:
        for session in self._sessions():
            session.post(command)

    def _sessions(self) -> list[Session]:
        """Return the sessions of the workers that are attached."""
        return list(self.roster.sessions.values())

    def _show_health(self) -> None:
        if self._is_draining:
            return
        troubles = self.roster.troubles()
        missing = ", ".join(f"{target} ({trouble})" for target, trouble in troubles.items())
        if len(troubles) < len(self.roster.engines):
            self._health.set_ready(f"without {missing}" if missing else None)
        elif self._sessions():
            self._health.set_not_ready(f"every worker hangs or is lost: {missing}")
        else:
            self._health.set_not_ready(f"no worker is attached: {missing or 'none is found'}")
