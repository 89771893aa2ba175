"""Where a worker's model is, if it is there: loads it, unloads it, and tells who serves it."""

import asyncio
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from contract.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
    UnimplementedError,
)
from gpu_worker.parallel.leader import Leader
from gpu_worker.service.api import WorkerService
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError
from rpc.health.state import Health
from rpc.tasks.shielded import retrieve

if TYPE_CHECKING:
    from gpu_worker.loading.worker_model import LoadedModel
    from gpu_worker.operations import AdapterServicer

_NO_MEMORY: Final = ("out of memory", "can't allocate memory", "Cannot allocate memory")
"""In the words of errors of torch and of the system that have no type of their own."""

_UNLOADED: Final = "its model is unloaded"

_log = structlog.get_logger()

Report = Callable[[str, float | None], None]
"""Takes what is being done, and how far it is in [0, 1]; called on whatever thread."""


class GaveUpError(Exception):
    """The process ends before the model is loaded."""


@dataclass(slots=True, eq=False)
class OngoingLoad:
    """A model on its way; it gets there, or fails, whether anybody waits or not."""

    directory: Path
    status: str = "waiting"
    progress: float | None = None
    task: "asyncio.Task[None] | None" = None

    async def wait(self, within_s: float) -> bool:
        """Wait until it is there; whether it is.

        Raises:
            QuireError, ModelError: It has failed, and there is no model.
        """
        assert self.task is not None, "it has begun"
        await asyncio.wait([self.task], timeout=within_s)
        if not self.task.done():
            return False
        await asyncio.shield(self.task)
        return True


class ModelSlot:
    """Has one model or none. Called from one event loop."""

    def __init__(
        self,
        settings: WorkerSettings,
        service: WorkerService,
        adapters: "AdapterServicer",
        health: Health,
        *,
        leader: Leader | None = None,
        on_failure: Callable[[], None],
    ) -> None:
        """`health` is told what becomes of the model.

        `on_failure` is called when no step can run any more: see `failure`. `leader` has the other
        ranks, if the model is on several devices; then it stays.
        """
        self.failure: str | None = None
        """Why no step can run in this process any more; None: they can."""
        self._settings = settings
        self._service = service
        self._adapters = adapters
        self._health = health
        self._leader = leader
        self._on_failure = on_failure
        self._directory = settings.model
        """Of the model that is there, or was last."""
        self._model: LoadedModel | None = None
        self._watch: asyncio.Task[None] | None = None
        self._loading: OngoingLoad | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._gave_up = threading.Event()

    def problem(self) -> str | None:
        """A liveness check: what is wrong, or None."""
        return None if self._model is None else self._model.steps.problem()

    async def load_first(self) -> None:
        """Load the model of the settings, as the process starts.

        Raises:
            ModelError: It cannot be served.
            GaveUpError: `close` was called.
        """
        await self._load(self._settings, self._health.set_starting)
        self._health.set_ready()

    def begin_load(self, directory: Path | None) -> OngoingLoad | None:
        """Begin to load a model, or join whoever has begun; None: it is there, and stays.

        One that is being unloaded is not there: the load begins when it is gone.

        Args:
            directory: Where it is; None: where it was last.

        Raises:
            UnimplementedError: It is on several devices.
            FailedPreconditionError: Another one is there, or on its way.
        """
        self._check_can_unload()
        directory = directory or (self._loading.directory if self._loading else self._directory)
        if self._loading is not None:
            if _is_same(directory, self._loading.directory):
                return self._loading
            raise FailedPreconditionError(
                f"directory is {directory}; the model in {self._loading.directory} is being loaded"
            )
        if self._model is not None and not self._is_unloading:
            if _is_same(directory, self._directory):
                return None
            raise FailedPreconditionError(
                f"directory is {directory}; the model in {self._directory} is loaded:"
                " unload it first"
            )
        load = self._loading = OngoingLoad(directory)
        load.task = asyncio.create_task(self._load_again(load), name="load of a model")
        load.task.add_done_callback(retrieve)
        return load

    async def unload(self) -> bool:
        """Give the device back, which goes on if the caller leaves; whether there was a model.

        Raises:
            UnimplementedError: The model is on several devices.
            FailedPreconditionError: One is being loaded.
            UnavailableError: A step does not end, and only the process's end gives the device back.
        """
        self._check_can_unload()
        if self._loading is not None:
            raise FailedPreconditionError(
                f"the model in {self._loading.directory} is being loaded: unload it when it is"
            )
        was_loaded = self._model is not None
        if was_loaded and not self._is_unloading:
            self._unloading = asyncio.create_task(self._unload(), name="unloading of the model")
            self._unloading.add_done_callback(retrieve)
        if self._unloading is not None:
            await asyncio.shield(self._unloading)
        return was_loaded

    async def close(self) -> None:
        """End what runs: the process ends."""
        self._gave_up.set()
        if self._watch is not None:
            self._watch.cancel()
        if self._unloading is not None:
            await asyncio.wait([self._unloading])
        if self._loading is not None and self._loading.task is not None:
            self._loading.task.cancel()
        if self._model is not None:
            self._model.memory.stop()
            await self._model.steps.stop()
            self.failure = self.failure or self._model.steps.failure

    @property
    def _is_unloading(self) -> bool:
        return self._unloading is not None and not self._unloading.done()

    async def _load(self, settings: WorkerSettings, report: Report) -> None:
        def tell(status: str, progress: float | None) -> None:
            if self._gave_up.is_set():
                raise GaveUpError
            report(status, progress)

        event_loop = asyncio.get_running_loop()
        model = await asyncio.to_thread(_load_model, settings, tell, event_loop, self._leader)
        self._model = model
        self._watch = asyncio.create_task(self._watch_steps(), name="failure of the steps")
        directory = "" if settings is self._settings else str(settings.model)
        info = replace(model.info, directory=directory)
        self._service.open(info, model.steps, model.memory)
        self._adapters.open(model.load_adapter, model.steps)

    async def _load_again(self, load: OngoingLoad) -> None:
        def report(status: str, progress: float | None) -> None:
            load.status, load.progress = status, progress
            self._health.set_ready(status)

        _log.info("loading a model", directory=str(load.directory))
        try:
            if self._unloading is not None:
                await asyncio.shield(self._unloading)
            await self._load(self._settings_of(load.directory), report)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            problem = _explain(error, load.directory)
            _log.warning("no model is loaded", reason=str(problem))
            await asyncio.to_thread(_begin_release)
            _forget_frames(error)
            await asyncio.to_thread(_release)
            self._health.set_ready(_UNLOADED)
            raise problem from None
        else:
            self._directory = load.directory
            self._health.set_ready()
        finally:
            self._loading = None

    async def _unload(self) -> None:
        assert self._model is not None, "there is one"
        _log.info("unloading the model", directory=str(self._directory))
        self._health.set_ready(_UNLOADED)
        await self._service.close()
        await self._adapters.close()
        if self._watch is not None:
            self._watch.cancel()
        model, self._model = self._model, None
        model.memory.stop()
        await asyncio.to_thread(_begin_release)
        if not await model.steps.stop():  # which drops what holds the memory
            self.failure = "the model's memory is not given back: a step takes too long"
            self._on_failure()
            raise UnavailableError(self.failure)
        await asyncio.to_thread(_release)
        _log.info("unloaded the model")

    def _settings_of(self, directory: Path) -> WorkerSettings:
        """All but what is of another model than that of the flags."""
        if _is_same(directory, self._settings.model):
            return self._settings
        other = {"model": directory, "served_model_name": "", "lora": ()}
        return self._settings.model_copy(update=other)

    def _check_can_unload(self) -> None:
        if self._settings.num_ranks > 1:
            raise UnimplementedError(
                f"{self._settings.worker_id} keeps its model: it was started with"
                " tensor_parallel_size or pipeline_parallel_size"
            )

    async def _watch_steps(self) -> None:
        assert self._model is not None, "it is watched while it is there"
        steps = self._model.steps
        await steps.wait_failed()
        self.failure = steps.failure
        self._on_failure()


def _load_model(
    settings: WorkerSettings,
    report: Report,
    event_loop: asyncio.AbstractEventLoop,
    leader: Leader | None,
) -> "LoadedModel":
    # Here and not above: torch takes seconds to import, and the ports should answer before.
    from gpu_worker.loading.worker_model import load  # noqa: PLC0415

    return load(settings, report, event_loop, leader)


def _begin_release() -> None:
    from gpu_worker.memory.trim import begin_release  # noqa: PLC0415 - torch, as above

    begin_release()


def _release() -> None:
    from gpu_worker.memory.trim import release_memory  # noqa: PLC0415 - torch, as above

    release_memory()


def _explain(error: Exception, directory: Path) -> Exception:
    """Say to who has asked why there is no model; what is no fault of theirs is as it is."""
    from gpu_worker.loading.kv_memory import NoRoomError  # noqa: PLC0415 - torch, as above

    is_memory = isinstance(error, NoRoomError | MemoryError)
    if is_memory or (isinstance(error, RuntimeError) and any(w in str(error) for w in _NO_MEMORY)):
        return FailedPreconditionError(f"there is no memory for the model in {directory}: {error}")
    if isinstance(error, ModelError):
        return InvalidArgumentError("directory", f"is {directory}: {error}")
    return error


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames hold that it, and those before it, were raised in."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
