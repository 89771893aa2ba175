"""All workers as one service: places requests, and places them again when a worker is lost."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog

from contract.errors import InvalidArgumentError, QuireError, TooBusyError, UnavailableError
from contract.info import ModelInfo, WorkerInfo
from contract.liveness.heartbeat import TICK_S
from contract.lora import LoraAdapter
from rpc.health import Health
from rpc.peers.discovery import Discovery, keep_members
from scheduler_svc.core.compact.defragment import DefragmentationReport
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.domain import (
    CancelSequences,
    Command,
    DefragmentBlocks,
    DropSource,
    SubmitRequest,
    UnpinPrompt,
    end_with_error,
    num_live_seqs,
)
from scheduler_svc.observers.spans import SequenceSpans
from scheduler_svc.routers.fan_out import RouterStreams
from scheduler_svc.wire.router import finished_to_proto
from scheduler_svc.workers.adapters import Adapters, AdapterUse, check_adapter
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.kv.far_tier import FarTier
from scheduler_svc.workers.kv.prefix_pulls import PrefixPulls
from scheduler_svc.workers.link import WorkerLink
from scheduler_svc.workers.placement import Placer, UnplacedRequests, for_prompts, prompt_hashes
from scheduler_svc.workers.roster import RequiredModel, Roster, ask_all
from scheduler_svc.workers.session import Session

_STALL_MARGIN_S = 5.0
_HAND_OVER_S = 2.0
"""The longest wait for the steps in flight at shutdown; live requests pause during the wait."""
_REUNION_S = 2.0
"""How long requests of an earlier scheduler wait for all workers to be attached, because any worker
may have their KV."""
_MAX_CRASHES = 3
"""A request ends with an error if its worker is lost this many times in a row while the request
runs, and the request gains no token in between (`CrashCounter`)."""

log = structlog.get_logger()


class Fleet:
    """All workers as one service; routers do not see how many there are, or which are lost."""

    def __init__(
        self,
        *,
        streams: RouterStreams,
        spans: SequenceSpans,
        health: Health,
        max_waiting: int,
        step_timeout_s: float,
        placer: Placer,
        pulls: PrefixPulls | None = None,
        far: FarTier | None = None,
        kept_adapters: Iterable[LoraAdapter] = (),
        keep_adapters: Callable[[Sequence[LoraAdapter]], None] = lambda _: None,
    ) -> None:
        """Start a fleet without workers.

        `kept_adapters` are the adapters that operators loaded at an earlier scheduler.
        `keep_adapters` gets the adapters that operators loaded and that new requests may have. It
        stores them for the next start.
        """
        self.roster = Roster()
        """The workers."""
        self._streams = streams
        self._spans = spans
        self._health = health
        self.max_waiting = max_waiting
        self._step_timeout_s = step_timeout_s
        self._placer = placer
        self._pulls, self._far = pulls, far
        self._unplaced = UnplacedRequests()
        self._adapter_use = AdapterUse(self.roster, self._unplaced)
        self.adapters = Adapters(
            self.roster,
            is_used=self._adapter_use.is_used,
            on_change=streams.publish_adapters,
            kept=kept_adapters,
            keep=keep_adapters,
        )
        """The LoRA adapters that the workers hold."""
        self.superseded_epochs: set[int] = set()
        """The epochs of the schedulers that workers obeyed before this scheduler attached them. If
        this scheduler has attached a worker again, the set has this scheduler's own epoch, too. If
        a worker had obeyed no scheduler before, the set has 0."""
        self._served = RequiredModel(self.roster)
        self._attached = asyncio.Event()
        self._is_reunion = True
        self._awaited: set[Engine] = set()
        """The engines whose workers were never attached. Requests of an earlier scheduler wait for
        these workers, because any of them may have the requests' KV. The set is emptied
        `_REUNION_S` after the start."""
        self._draining_engines: asyncio.Queue[Engine] = asyncio.Queue()
        self._is_draining = False
        self._has_failed = False

    # --- requests -------------------------------------------------------------------------------

    async def model(self) -> ModelInfo:
        """Wait until a worker is attached; return the model that the workers serve.

        The model's `max_model_len` is the smallest of the attached workers' limits.

        Raises:
            UnavailableError: The scheduler ends before a worker is attached.
        """
        while (model := self.model_now()) is None:
            if self._is_draining:
                raise _shutting_down()
            self._attached.clear()
            await self._attached.wait()
        return model

    def model_now(self) -> ModelInfo | None:
        """Return the model as `model` does, without waiting; None: no worker is attached."""
        models = [session.model() for session in self._sessions()]
        model = min(models, key=lambda model: model.max_model_len, default=None)
        return None if model is None else replace(model, adapters=self.adapters.offered)

    def submit(self, request: Request) -> None:
        """Place a request; if the worker's core refuses it, the source gets a refusal.

        Raises:
            InvalidArgumentError: The request has more sequences than an empty queue can hold.
            TooBusyError: The queues of all workers are full.
        """
        if not request.outputs and request.n > self.max_waiting:
            raise InvalidArgumentError(
                "n", f"is {request.n}; it must be at most {self.max_waiting} (--max-waiting)"
            )
        self._place(SubmitRequest(request))

    def cancel(self, source: SourceId, seq_keys: Sequence[SeqKey]) -> None:
        """Cancel sequences, wherever they are: at a worker, or waiting for one."""
        self._post_to_all(CancelSequences(source, seq_keys))
        finished = self._unplaced.cancel(source, seq_keys)
        self._streams.deliver(finished_to_proto(finished))

    def drop_source(self, source: SourceId) -> None:
        """Cancel all sequences of `source`, a router's stream that has ended."""
        self._post_to_all(DropSource(source))
        self._unplaced.drop_source(source)
        self._spans.drop_source(source)  # for unplaced requests; the sessions drop theirs

    def unpin(self, tenant: str, request_id: str) -> None:
        """Drop the pins of a request's prompt at all workers."""
        self._post_to_all(UnpinPrompt(tenant, request_id))

    def on_router_left(self) -> None:
        """Called when a router's stream has ended; the router may resubmit its requests later."""
        self._adapter_use.expect()

    async def defragment(self) -> Mapping[str, DefragmentationReport]:
        """Defragment each attached worker, and wait for the reports.

        Raises:
            UnavailableError: No worker is attached, or a worker is lost before it has reported.
        """

        def defragment(session: Session) -> asyncio.Future[DefragmentationReport]:
            done = asyncio.get_running_loop().create_future()
            session.post(DefragmentBlocks(done))
            return done

        reports, errors = await ask_all(self.roster.sessions, defragment)
        for error in errors.values():
            raise error
        if not reports:
            raise UnavailableError("no worker is attached")
        return reports

    # --- state ----------------------------------------------------------------------------------

    @property
    def num_unplaced_seqs(self) -> int:
        """Number of sequences that wait for a worker, or for a copy of their prefix."""
        return self._unplaced.num_seqs

    @property
    def queue_room(self) -> int:
        """How many more sequences can wait at the worker with the most room.

        If no worker takes requests: how many more can wait for a worker.
        """
        sessions = [session for session in self._sessions() if not session.is_draining]
        if not sessions:
            return max(0, self.max_waiting - self._unplaced.num_seqs)
        loads = [session.placement_load() for session in for_prompts(sessions)]
        return max(0, *(load.max_waiting - load.num_waiting for load in loads))

    @property
    def num_live_seqs(self) -> int:
        """Number of running and waiting sequences, including those without a worker."""
        loads = [session.load() for session in self._sessions()]
        return self._unplaced.num_seqs + sum(load.num_running + load.num_waiting for load in loads)

    def describe_stall(self) -> str | None:
        """Describe a step in flight that has exceeded its timeout, if there is one."""
        for worker, age_s in self.roster.oldest_step_ages_s().items():
            # The link gives a worker up before this age, unless its engine has stopped running.
            if age_s > self._step_timeout_s + _STALL_MARGIN_S:
                return f"worker {worker}: a step has been in flight for {age_s:.0f} s"
        return None

    # --- life -----------------------------------------------------------------------------------

    async def run(
        self,
        discovery: Discovery,
        make_engine: Callable[[str], Engine],
        on_gone: Callable[[str], None],
    ) -> None:
        """Run an engine for each worker until cancelled.

        A worker is gone when it is neither discovered nor attached any more. A worker that DNS no
        longer lists keeps working while it is attached. If a listed worker is lost, its engine
        keeps trying to attach it.

        Args:
            discovery: Finds the workers.
            make_engine: Creates the engine for a worker's address (target), with this fleet as the
                engine's owner.
            on_gone: Called with the target of each worker that is gone.

        Raises:
            StaleEpochError: A newer scheduler has taken over.
            BrokenInvariantError: An engine has a bug.
        """

        def join(target: str) -> Engine:
            engine = make_engine(target)
            self.roster.add(engine)
            if self._is_reunion:
                self._awaited.add(engine)
            self._update_health()
            return engine

        def left(engine: Engine) -> None:
            self.roster.remove(engine)
            self._awaited.discard(engine)
            self._update_health()
            self.place_unplaced()  # some requests may have waited only for this worker
            on_gone(engine.target)

        asyncio.get_running_loop().call_later(_REUNION_S, self._end_reunion)
        self._update_health()
        try:
            await keep_members(
                discovery, join=join, may_leave=lambda engine: engine.session is None, left=left
            )
        except Exception:
            self._has_failed = True
            raise

    async def watch(self) -> None:
        """Log workers that begin to hang, and update the health, until cancelled."""
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
                self._update_health()

    async def drain(self) -> None:
        """Plan no more steps, wait for the steps in flight, and end the routers' streams.

        The routers submit their live requests to the next scheduler. If this scheduler finished
        these requests, the next scheduler would have to wait until the longest one ends.
        """
        self._is_draining = True
        self._attached.set()  # end the calls that wait for a worker
        # a failed engine handles no results
        sessions = [] if self._has_failed else self._sessions()
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                await asyncio.gather(*(session.hand_over() for session in sessions))
        except TimeoutError:
            log.warning("shutting down with steps in flight", waited_s=_HAND_OVER_S)
        finally:
            self._streams.end_all(_shutting_down())

    def place_unplaced(self) -> None:
        """Place the requests that waited for a worker."""
        for command in self._unplaced.take_without_worker():
            self._place_late(command)

    async def next_draining(self) -> Engine:
        """Wait until a worker announces that it will end; return the worker's engine."""
        return await self._draining_engines.get()

    # --- for the engines (EngineOwner) ----------------------------------------------------------

    def accept(self, engine: Engine, info: WorkerInfo) -> None:
        """Do as `EngineOwner.accept` says.

        If the service switches to the worker's model, end the requests for the old model.
        """
        if self._served.accept(engine, info):
            self._switch_model(f"the service now has another model, {info.model.id!r}")

    async def settle(self, engine: Engine, link: WorkerLink) -> None:
        await self.adapters.settle(engine.target, link, link.info.model.adapters)
        self.accept(engine, link.info)  # another worker may have joined with another model

    def on_attached(self, engine: Engine) -> None:
        self.superseded_epochs.add(engine.attached_session().link.former_epoch)
        if len(self._sessions()) == 1:  # routers that waited for a worker submit now
            self._adapter_use.expect()
        self._attached.set()
        self._awaited.discard(engine)
        self._update_health()
        self.place_unplaced()

    def on_draining(self, engine: Engine) -> None:
        self._draining_engines.put_nowait(engine)

    def on_unavailable(self, engine: Engine) -> None:  # noqa: ARG002
        self._update_health()

    def on_lost(self, engine: Engine, commands: tuple[SubmitRequest, ...]) -> None:
        """Place the requests of a lost worker elsewhere, or keep them until a worker is attached.

        A request ends with an error if `_MAX_CRASHES` workers in a row were lost while they ran it
        and added no token to it. The request may be the cause of the losses, and would harm the
        requests of the next worker, too.
        """
        for command in commands:
            if command.num_crashes < _MAX_CRASHES:
                self._place(command)
            else:
                self._fail(command, engine)

    # --- parts ----------------------------------------------------------------------------------

    def _end_reunion(self) -> None:
        self._is_reunion = False
        self._awaited.clear()
        self.place_unplaced()

    def _place_late(self, command: SubmitRequest, chosen: Session | None = None) -> None:
        """Place a request that had to wait; if that fails, send its source a refusal.

        If the request waited for a copy of its prefix, `chosen` is the worker that was to get the
        copy.
        """
        try:
            check_adapter(command.request, self.adapters.held)
            self._place(command, chosen)
        except QuireError as error:
            self._streams.refuse(command.request, error)

    def _pull_prefix(self, command: SubmitRequest, session: Session, num_tokens: int) -> bool:
        """Copy a request's prefix to a worker, if a copy is faster than computing the prefix.

        Return whether a copy was started. While the copy runs, the request is kept in `_unplaced`.

        Args:
            command: Submits the request.
            session: The worker's session.
            num_tokens: Number of tokens that the worker has to compute without the copy.
        """
        sessions = self.roster.sessions
        is_shared = self._far is not None and session.info.has_far_kv
        if not is_shared and (self._pulls is None or len(sessions) == 1):
            return False
        hashes = prompt_hashes(command.request, session.block_size)
        start: Callable[[Callable[[], None]], None]
        if self._pulls and (pull := self._pulls.find(hashes, session, sessions)):
            start = partial(self._pulls.start, pull)
        elif self._far and (fetch := self._far.find(hashes, session)):
            start = partial(self._far.start, fetch)
        else:
            return False
        name = command.request.source, command.request.first_seq_key

        def place() -> None:  # unless it was cancelled
            if (waiting := self._unplaced.take(*name)) is not None:
                self._place_late(waiting, session)

        self._unplaced.add(command, session, num_tokens)
        start(place)
        return True

    def _place(self, command: SubmitRequest, chosen: Session | None = None) -> None:
        """Post a request to the best worker, or keep it if no worker is attached.

        A request that has waited for a copy of its prefix goes to `chosen`, the worker that was to
        get the copy, unless this worker is lost, leaves, hangs or has a full queue.

        Raises:
            TooBusyError: The queues are full; never raised for a request that was accepted before.
        """
        if self._is_draining:
            return  # its router submits the request to the next scheduler
        can_refuse = not command.was_accepted
        n = num_live_seqs(command.request)
        sessions = [session for session in self._sessions() if not session.is_draining]
        if not sessions:
            if can_refuse and self._unplaced.num_seqs + n > self.max_waiting:
                raise self._too_busy(self._unplaced.num_seqs, n)
            self._unplaced.add(command)
            return
        num_held_tokens = [session.num_held_tokens(command.request) for session in sessions]
        if most := max(num_held_tokens):  # several workers may hold tokens of a moved request
            sessions[num_held_tokens.index(most)].post(command)
            return
        if self._awaited and command.request.outputs:
            # A worker that is not attached yet may have the request's KV.
            self._unplaced.add(command)
            return
        sessions = [each for each in sessions if each.trouble() is None] or sessions
        if chosen is not None and chosen in sessions:
            only = [chosen]  # unless its queue has filled up during the copy
            if self._placer.choose(command.request, only, can_refuse=can_refuse) is not None:
                sessions = only
        choice = self._placer.choose(command.request, sessions, can_refuse=can_refuse)
        if choice is None:
            loads = [session.placement_load() for session in for_prompts(sessions)]
            raise self._too_busy(min(load.num_waiting for load in loads), n)
        session = sessions[choice.index]
        if chosen is None and self._pull_prefix(command, session, choice.num_tokens):
            return
        session.post(command, choice.num_tokens)
        if self._far is not None and session.info.has_far_kv:
            self._far.store_later(command.request)

    def _switch_model(self, why: str) -> None:
        """End the requests for the old model, and the routers' streams.

        When the routers connect again, they learn the new model.
        """
        for command in self._unplaced.take_all():
            self._end_with_error(command.request, why)
        self._streams.resumables.forget_all()
        self.adapters.forget()
        self._streams.end_all(UnavailableError(why))

    def _fail(self, command: SubmitRequest, engine: Engine) -> None:
        request = command.request
        error = (
            f"its worker was lost {command.num_crashes} times in a row while the request ran, "
            f"and the request gained no token in between: {engine.loss}"
        )
        log.error(
            "a request may crash workers and was ended",
            request_id=request.request_id,
            num_losses=command.num_crashes,
        )
        self._end_with_error(request, error)

    def _end_with_error(self, request: Request, error: str) -> None:
        finished = end_with_error(request, error)
        for item in finished:
            self._spans.on_finished(item)
        self._streams.deliver(finished_to_proto(finished))

    def _too_busy(self, num_waiting: int, n: int) -> TooBusyError:
        return TooBusyError(
            f"the queue is full: {num_waiting} sequences wait, and this request has {n} more; "
            f"the limit is {self.max_waiting} (--max-waiting)"
        )

    def _post_to_all(self, command: Command) -> None:
        for session in self._sessions():
            session.post(command)

    def _sessions(self) -> list[Session]:
        """Return the sessions of the attached workers."""
        return list(self.roster.sessions.values())

    def _update_health(self) -> None:
        if self._is_draining:
            return
        troubles = self.roster.troubles()
        missing = ", ".join(f"{target} ({trouble})" for target, trouble in troubles.items())
        if len(troubles) < len(self.roster.engines):
            self._health.set_ready(f"without {missing}" if missing else None)
        elif self.roster.engines and len(self.roster.unloaded()) == len(self.roster.engines):
            self._health.set_ready(f"every model is unloaded: {missing}")  # requests wait
        elif self._sessions():
            self._health.set_not_ready(f"every worker hangs or is lost: {missing}")
        else:
            self._health.set_not_ready(f"no worker is attached: {missing or 'none is found'}")


def _shutting_down() -> UnavailableError:
    return UnavailableError("the scheduler is shutting down")
