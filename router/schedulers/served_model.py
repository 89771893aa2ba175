"""The model that the router serves, and its LoRA adapters: their names, and the limits.

Each adapter is a model of its own to clients, with the limits of the model that it belongs to.
"""

from collections.abc import Mapping

from contract.errors import NotFoundError
from contract.lora import LoraAdapter
from contract.request import Model
from router.schedulers.pool import Schedulers

_NO_ADAPTERS: Mapping[str, LoraAdapter] = {}


class ServedModel:
    """Every method that takes a `name` accepts "" for the model without an adapter."""

    def __init__(self, name: str, schedulers: Schedulers) -> None:
        """`name` is what requests call the model of the flags."""
        self._name = name
        self._schedulers = schedulers

    @property
    def name(self) -> str:
        """What requests call it: as the flags say, or if it was loaded since, as the workers do."""
        model = self._schedulers.model
        return self._name if model is None or not model.directory else model.id

    @property
    def directory(self) -> str:
        """Where it is, if it was loaded since the start; tells it from all others."""
        model = self._schedulers.model
        return "" if model is None else model.directory

    def check_name(self, name: str) -> None:
        """Raises `NotFoundError` unless it is the model's, or that of an adapter of it.

        Until a scheduler has told of the adapters there are none.
        """
        if name in ("", self.name):
            return
        adapters = self._adapters()
        if name not in adapters:
            served = ", ".join(map(repr, (self.name, *adapters)))
            verb = "are" if adapters else "is"
            raise NotFoundError(f"model {name[:128]!r} is not served; {served} {verb}")

    def info(self, name: str = "") -> Model:
        """The model or adapter of this name, with its limits.

        Raises `NotFoundError` if there is none; `UnavailableError` until a scheduler has told the
        limits.
        """
        self.check_name(name)
        model = self._schedulers.model
        if model is None:
            raise self._schedulers.unavailable()
        adapter = None if name in ("", self.name) else self._adapters()[name]
        return Model(
            self.name if adapter is None else adapter.name,
            model.max_model_len,
            model.vocab_size,
            model.eos_token_ids,
            model.structured_output,
            parent="" if adapter is None else self.name,
            adapter=adapter,
        )

    def infos(self) -> tuple[Model, ...]:
        """All that is served: the model, then its adapters; none until its limits are known."""
        if self._schedulers.model is None:
            return ()
        return tuple(map(self.info, (self.name, *self._adapters())))

    def has(self, name: str, digest: bytes) -> bool:
        """Whether requests may name this adapter."""
        return self._adapters().get(name) == LoraAdapter(name, digest)

    def _adapters(self) -> Mapping[str, LoraAdapter]:
        """By name. One that is called as the model is cannot be asked for."""
        model = self._schedulers.model
        if model is None:
            return _NO_ADAPTERS
        return {a.name: a for a in model.adapters if a.name != self.name}
