"""Loads and unloads the worker's model, and opens and closes the services that need it."""

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
from gpu_worker.loading.early_check import check_config
from gpu_worker.parallel.leader import Leader
from gpu_worker.service.api import WorkerService
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError
from rpc.health import Health
from rpc.tasks import retrieve

if TYPE_CHECKING:
    from gpu_worker.loading.worker_model import LoadedModel
    from gpu_worker.service.adapters import AdapterServicer

_NO_MEMORY: Final = ("out of memory", "can't allocate memory", "Cannot allocate memory")
"""Parts of the messages of out-of-memory errors that have no type of their own."""

_UNLOADED: Final = "its model is unloaded"

_log = structlog.get_logger()

Report = Callable[[str, float | None], None]
"""Takes a status, and the progress in [0, 1] or None if unknown. Called on any thread."""


class GaveUpError(Exception):
    """`ModelSlot.close` was called while the model was being loaded, so the load was given up."""


@dataclass(slots=True, eq=False)
class OngoingLoad:
    """A load in progress. It continues even if no caller waits for it."""

    directory: Path
    status: str = "waiting"
    progress: float | None = None
    task: "asyncio.Task[None] | None" = None

    async def wait(self, within_s: float) -> bool:
        """Wait at most `within_s` for the model; return whether it is loaded.

        Raises:
            QuireError, ModelError: The load failed; no model is loaded.
        """
        assert self.task is not None, "the load has begun"
        await asyncio.wait([self.task], timeout=within_s)
        if not self.task.done():
            return False
        await asyncio.shield(self.task)
        return True


class ModelSlot:
    """Holds one model or none. Called from one event loop."""

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
        """`health` is updated with the model's status.

        `on_failure` is called when no step can run any more: see `failure`. `leader` connects to
        the other ranks if the model is on several devices; such a model is never unloaded.
        """
        self.failure: str | None = None
        """Why no step can run in this process any more; None if steps can run."""
        self._settings = settings
        self._service = service
        self._adapters = adapters
        self._health = health
        self._leader = leader
        self._on_failure = on_failure
        self._directory = Path(settings.model)
        """The directory of the model that was loaded last; at first that of the setting `model`."""
        self._model: LoadedModel | None = None
        self._watch: asyncio.Task[None] | None = None
        self._loading: OngoingLoad | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._gave_up = threading.Event()

    def problem(self) -> str | None:
        """Return what is wrong, for a liveness check; None if nothing is."""
        return None if self._model is None else self._model.steps.problem()

    async def load_first(self) -> None:
        """Load the model at the start of the process, unless `settings.unloaded` is true.

        Raises:
            ModelError: The model cannot be served.
            GaveUpError: `close` was called.
        """
        if self._settings.unloaded:
            self._service.begin_unloaded(self._settings.worker_id)
            self._health.set_ready(_UNLOADED)
            return
        await self._load(self._settings, self._health.set_starting)
        self._health.set_ready()

    def begin_load(self, directory: Path | None) -> OngoingLoad | None:
        """Begin to load a model, or join a load in progress; None if the model is loaded already.

        If a model is being unloaded, the load begins afterwards.

        Args:
            directory: The model's directory; None: the directory of the load in progress; if no
                load is in progress, the directory of the model that was loaded last.

        Raises:
            UnimplementedError: The model is on several devices.
            FailedPreconditionError: Another model is loaded or being loaded.
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
        """Unload the model, even if the caller stops waiting.

        Returns whether a model was loaded when the call began.

        Raises:
            UnimplementedError: The model is on several devices.
            FailedPreconditionError: A model is being loaded.
            UnavailableError: A step hangs; only the end of the process frees the device.
        """
        self._check_can_unload()
        if self._loading is not None:
            raise FailedPreconditionError(
                f"the model in {self._loading.directory} is being loaded: unload it afterwards"
            )
        was_loaded = self._model is not None
        if was_loaded and not self._is_unloading:
            self._unloading = asyncio.create_task(self._unload(), name="unloading of the model")
            self._unloading.add_done_callback(retrieve)
        if self._unloading is not None:
            await asyncio.shield(self._unloading)
        return was_loaded

    async def close(self) -> None:
        """Stop the model's steps and any load before the process ends."""
        self._gave_up.set()
        if self._watch is not None:
            self._watch.cancel()
        if self._unloading is not None:
            await asyncio.wait([self._unloading])
        if self._loading is not None and self._loading.task is not None:
            self._loading.task.cancel()
        if self._model is not None:
            self._model.memory.stop()
            if self._model.transfer is not None:
                await self._model.transfer.close()
            await self._model.steps.stop()
            self.failure = self.failure or self._model.steps.failure

    @property
    def _is_unloading(self) -> bool:
        return self._unloading is not None and not self._unloading.done()

    async def _load(self, settings: WorkerSettings, report: Report) -> None:
        def report_unless_closed(status: str, progress: float | None) -> None:
            if self._gave_up.is_set():
                raise GaveUpError
            report(status, progress)

        event_loop = asyncio.get_running_loop()
        model = await asyncio.to_thread(
            _load_model, settings, report_unless_closed, event_loop, self._leader
        )
        self._model = model
        self._watch = asyncio.create_task(self._watch_steps(), name="failure of the steps")
        directory = "" if settings is self._settings else settings.model
        info = replace(model.info, directory=directory)
        self._service.open(info, model.steps, model.memory, model.transfer, model.far)
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
        except Exception as error:  # noqa: BLE001 - the caller gets it
            problem = _explain(error, load.directory)
            _log.warning("loading a model failed", reason=str(problem))
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
        assert self._model is not None, "only a loaded model is unloaded"
        _log.info("unloading the model", directory=str(self._directory))
        self._health.set_ready(_UNLOADED)
        await self._service.close()
        await self._adapters.close()
        if self._watch is not None:
            self._watch.cancel()
        model, self._model = self._model, None
        model.memory.stop()
        if model.far is not None:
            model.far.close()
        if model.transfer is not None:  # before freeing the memory that other workers read
            await model.transfer.close()
        await asyncio.to_thread(_begin_release)
        if not await model.steps.stop():  # drops the executor, which holds the memory
            self.failure = "the model's memory cannot be freed: a step takes too long"
            self._on_failure()
            raise UnavailableError(self.failure)
        await asyncio.to_thread(_release)
        _log.info("unloaded the model")

    def _settings_of(self, directory: Path) -> WorkerSettings:
        """Return the settings for a model.

        The settings `served_model_name` and `lora` apply only to the model that the setting `model`
        names. A model in another directory gets neither.
        """
        if _is_same(directory, Path(self._settings.model)):
            return self._settings
        other = {"model": str(directory), "served_model_name": "", "lora": ()}
        return self._settings.model_copy(update=other)

    def _check_can_unload(self) -> None:
        if self._settings.num_ranks > 1:
            raise UnimplementedError(
                f"{self._settings.worker_id} keeps its model: it was started with"
                " tensor_parallel_size or pipeline_parallel_size"
            )

    async def _watch_steps(self) -> None:
        assert self._model is not None, "only a loaded model is watched"
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
    check_config(settings, report)
    # Imported here because torch takes seconds to import, and the ports should answer earlier.
    from gpu_worker.loading.worker_model import load  # noqa: PLC0415

    return load(settings, report, event_loop, leader)


def _begin_release() -> None:
    from gpu_worker.memory.trim import begin_release  # noqa: PLC0415 - torch, as above

    begin_release()


def _release() -> None:
    from gpu_worker.memory.trim import release_memory  # noqa: PLC0415 - torch, as above

    release_memory()


def _explain(error: Exception, directory: Path) -> Exception:
    """Return the error that tells the caller why the model is not loaded."""
    from gpu_worker.loading.kv_memory import NoRoomError  # noqa: PLC0415 - torch, as above

    is_memory = isinstance(error, NoRoomError | MemoryError)
    if is_memory or (isinstance(error, RuntimeError) and any(w in str(error) for w in _NO_MEMORY)):
        return FailedPreconditionError(f"there is no memory for the model in {directory}: {error}")
    if isinstance(error, ModelError):
        return InvalidArgumentError("directory", f"is {directory}: {error}")
    return error


def _forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and its causes, because their variables keep memory alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
