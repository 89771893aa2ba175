"""Finds the cell of a model by the model's name.

Each cell has its own schedulers, tokenizer and limits. If one cell has no scheduler, the other
cells still serve requests.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from contract.errors import (
    AbortedError,
    InvalidArgumentError,
    ModelNotFoundError,
    NotFoundError,
    QuireError,
    UnavailableError,
)
from contract.request import GenerateRequest, Model, ResumeRequest
from quire.v1.common_pb2 import ActivityQuery, Load, WorkerActivity
from quire.v1.kv_pb2 import KvQuery, WatchKvResponse, WorkerKv
from router.live.live_request import LiveRequest
from router.request.admission import AdmittedRequest
from router.request.inference import Inference, refusals_counted
from router.request.on_demand import OnDemand, is_patient
from router.request.shared_admission import SharedAdmission
from router.schedulers.calls import sum_loads
from router.schedulers.kv_watch import watch_kv
from rpc.health import Health

T = TypeVar("T")


class Cells:
    """The cells of all models, and the calls that concern several cells."""

    def __init__(
        self, cells: Sequence[Inference], shared: SharedAdmission, on_demand: OnDemand | None = None
    ) -> None:
        """`cells` has at least one cell; the names of the cells differ.

        `shared` is the admission that all cells share. Requests that name no model go to the first
        cell.
        """
        self.all = tuple(cells)
        self.shared = shared
        self.on_demand = on_demand

    # --- by name --------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models; the names of adapters are not included."""
        return tuple(cell.model.name for cell in self.all)

    def of(self, model: str) -> Inference:
        """Return the cell that serves a model or an adapter; if the name is empty, the first cell.

        If there are several cells, an unknown name raises `NotFoundError`. If there is only one
        cell, it is returned for any name, and its own methods check the name.
        """
        if len(self.all) == 1 or not model:
            return self.all[0]
        for cell in self.all:
            if cell.model.name == model:
                return cell
        for cell in self.all:
            if cell.model.has_adapter(model):
                return cell
        raise ModelNotFoundError(model, [name for cell in self.all for name in cell.model.names()])

    def served_by(self, model: str) -> str:
        """Return the name of the cell that serves `model`; `model` itself if no cell serves it."""
        try:
            return self.of(model).name
        except NotFoundError:
            return model

    def only(self, model: str) -> Inference:
        """Return the cell of a model; the name may be empty only if there is one cell.

        Raises `InvalidArgumentError` if there are several cells and no name, and `NotFoundError` if
        the name is unknown.
        """
        if not model and len(self.all) > 1:
            raise InvalidArgumentError(
                "model", f"is not set; it must be one of {', '.join(map(repr, self.names))}"
            )
        return self.of(model)

    def some(self, model: str) -> Sequence[Inference]:
        """Return the cell of a model, or all cells if the name is empty; raises `of`'s errors."""
        return [self.of(model)] if model else self.all

    def infos(self) -> tuple[Model, ...]:
        """Return the known models, each followed by its adapters.

        A model that is loaded on demand is listed even before its first load, but without limits.
        If two cells know the same name, only the model of the cell that `of` returns is listed.
        """
        found: dict[str, Model] = {}
        for cell in self.all:
            models = cell.model.infos()
            if not models and self.on_demand is not None:  # the first request loads it
                models = (Model(cell.model.name, 0, 0, ()),)
            for model in models:
                if self.of(model.id) is cell:
                    found.setdefault(model.id, model)
        return tuple(found.values())

    # --- requests -------------------------------------------------------------------------------

    def check_quota(self, num_bytes: int) -> None:
        """Raise `TooBusyError` if the caller's quota has no room for a body of `num_bytes`."""
        most = max(cell.text.max_token_bytes for cell in self.all)
        with refusals_counted():
            self.shared.check_quota(num_bytes, most)

    async def use(self, model: str, *, is_patient: bool = False) -> Inference:
        """Return the cell of a request's model; with loading on demand, load the model first.

        If `is_patient` is true, models that are busy with other requests are not unloaded to make
        room for this model.

        Raises the errors of `of` and `OnDemand.wait_until_loaded`.
        """
        with refusals_counted():
            cell = self.of(model)
            if self.on_demand is not None:
                await self.on_demand.wait_until_loaded(cell, is_patient=is_patient)
            return cell

    async def known(self, model: str) -> Inference:
        """Return a model's cell; load the model first if its limits are not known yet."""
        cell = self.of(model)
        return cell if cell.model.infos() else await self.use(model)

    async def generate(self, request: GenerateRequest, *, is_kept: bool = False) -> LiveRequest:
        """Submit a request to the cell of its model; see `Inference.generate`."""
        cell = await self.use(request.model, is_patient=is_patient(request.priority))
        return await cell.generate(request, is_kept=is_kept)

    async def resume(self, request: ResumeRequest, model: str = "") -> LiveRequest:
        """Continue a request; an empty model name searches all cells. See `Inference.resume`."""
        request = replace(request, tenant=self.shared.tenant_of(request.tenant))
        return await self._where(
            request.tenant,
            request.request_id,
            model,
            lambda cell, is_charged: cell.resume(request, is_free=is_charged),
        )

    async def cancel(self, request_id: str, tenant: str, model: str = "") -> None:
        """Cancel a resumable request, even if another call reads it; raises `resume`'s errors."""
        await self.cancel_of(self.shared.tenant_of(tenant), request_id, model)

    async def cancel_of(self, tenant: str, request_id: str, model: str = "") -> None:
        """Cancel a tenant's resumable request.

        The caller must have checked that the client may cancel the request. The call is not charged
        to the tenant's quota.
        """
        await self._where(
            tenant, request_id, model, lambda cell, _: cell.cancel_of(tenant, request_id)
        )

    async def _where(
        self,
        tenant: str,
        request_id: str,
        model: str,
        ask: Callable[[Inference, bool], Awaitable[T]],
    ) -> T:
        """Call `ask` for one cell after another, until one has the resumable request.

        The second argument of `ask` is true if an earlier call of `ask` has been charged to the
        quota, so that this call is not charged again. Clients do not retry after `NotFoundError`,
        so this error is raised only if every cell could be searched.
        """
        with refusals_counted():
            try:
                cells = self.some(model)
            except ModelNotFoundError:  # the name of an adapter that has been unloaded
                cells = self.all
            if (admitted := self.shared.admission.find(tenant, request_id)) is not None:
                cells = [cell for cell in self.all if cell.name == admitted.model]
            refusals: list[QuireError] = []
            for cell in cells:
                try:
                    is_charged = any(isinstance(each, NotFoundError) for each in refusals)
                    return await ask(cell, is_charged)
                except (NotFoundError, UnavailableError) as error:
                    refusals.append(error)
            raise next((e for e in refusals if isinstance(e, UnavailableError)), refusals[0])

    def abort(self, request_ids: Iterable[str], tenant: str = "") -> None:
        """End live requests of the caller's tenant at this router; ignore unknown ids.

        Their calls end with ABORTED. `tenant` is the tenant that the caller claims.
        """
        tenant, wanted = self.shared.tenant_of(tenant), {*request_ids}
        for each in self.admitted:
            if each.tenant == tenant and each.request_id in wanted:
                each.end(AbortedError(f"request {each.request_id!r} was aborted"))

    @property
    def admitted(self) -> Sequence[AdmittedRequest]:
        """This router's live requests, oldest first.

        A request is live from its admission until its outputs have been read to the end, or until
        the call that reads them ends early.
        """
        return self.shared.admission.admitted

    @property
    def num_live(self) -> int:
        """Number of live requests, as in `admitted`."""
        return len(self.shared.admission)

    # --- what the schedulers report -------------------------------------------------------------

    async def load(self, model: str = "") -> Load:
        """Return the load of a model's schedulers; if `model` is empty, of all connected ones.

        Raises `NotFoundError` for an unknown model, and `UnavailableError` if no scheduler answers.
        """
        return sum_loads(await self._known(model, self._load_of))

    async def _load_of(self, cell: Inference) -> Load:
        try:
            return await cell.schedulers.load()
        except UnavailableError:
            if self.on_demand is not None and (load := await self.on_demand.load_of(cell)):
                return load  # not connected, because these schedulers have not had a model yet
            raise

    async def describe_kv(self, query: KvQuery) -> Sequence[WorkerKv]:
        """Return which sequences hold which KV blocks; may raise a scheduler's error.

        Raises `PermissionDeniedError` if the call's API key belongs to a tenant.
        """
        self.shared.check_operator()
        found = await self._known("", lambda cell: cell.schedulers.describe_kv(query))
        return [worker for workers in found for worker in workers]

    async def describe_activity(self, query: ActivityQuery) -> Sequence[WorkerActivity]:
        """Return the activity of the workers; raises the errors of `describe_kv`."""
        self.shared.check_operator()
        found = await self._known("", lambda cell: cell.schedulers.describe_activity(query))
        return [worker for workers in found for worker in workers]

    def watch_kv(self, worker: str = "", model: str = "") -> AsyncGenerator[WatchKvResponse]:
        """Yield the events of a model's prefix caches (`router/schedulers/kv_watch.py`).

        Raises the errors of `describe_kv` and `only`.
        """
        self.shared.check_operator()
        return watch_kv(self.only(model).schedulers, worker)

    async def _known(self, model: str, ask: Callable[[Inference], Awaitable[T]]) -> list[T]:
        """Ask the cells concurrently; raise an error only if no cell answers."""

        async def one(cell: Inference) -> T | QuireError:
            try:
                return await ask(cell)
            except QuireError as error:
                return error

        ends = await asyncio.gather(*map(one, self.some(model)))
        answers = [end for end in ends if not isinstance(end, QuireError)]
        if not answers:
            raise next(end for end in ends if isinstance(end, QuireError))
        return answers

    # --- the end --------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Admit no more requests; return when all live requests have been read to the end.

        If this call is cancelled, resumable requests continue at their schedulers, and their
        clients get an error that asks them to resume at another router.
        """
        if self.on_demand is not None:
            self.on_demand.drain()
        for cell in self.all:
            cell.schedulers.set_draining()
        try:
            await self.shared.admission.drain()
        except asyncio.CancelledError:
            for cell in self.all:
                cell.hand_over()
            raise

    def close(self) -> None:
        """End the threads that work on text."""
        for cell in self.all:
            cell.close()


def join_health(cells: Sequence[tuple[str, Health]], router: Health) -> None:
    """Declare the router ready while at least one cell is ready.

    The router's status names the cells that are not ready.
    """

    def update() -> None:
        waiting = [f"{name}: {health.status}" for name, health in cells if not health.ready]
        if len(waiting) < len(cells):
            router.set_ready("; ".join(waiting) or None)
        else:
            router.set_not_ready("; ".join(waiting))

    for _, health in cells:
        health.on_change(update)
    router.add_details(
        "models",
        lambda: {name: {"ready": each.ready, "status": each.status} for name, each in cells},
    )
    update()
