"""The served model and its LoRA adapters, with their names and limits.

Clients see each adapter as a separate model with the limits of its base model.
"""

from collections.abc import Mapping

from contract.errors import ModelNotFoundError
from contract.lora import LoraAdapter
from contract.request import Model
from router.schedulers.pool import Schedulers

_NO_ADAPTERS: Mapping[str, LoraAdapter] = {}


class ServedModel:
    """The served model. For `check_name` and `info`, "" names the model without an adapter."""

    def __init__(self, name: str, schedulers: Schedulers) -> None:
        """`name` is the name that requests use for the model of --model or --cell."""
        self._name = name
        self._schedulers = schedulers

    @property
    def name(self) -> str:
        """The model's name in requests.

        If an operator loaded the model, this name comes from the workers, otherwise from the flags.
        """
        model = self._schedulers.model
        return self._name if model is None or not model.directory else model.id

    @property
    def directory(self) -> str:
        """The model's directory if an operator loaded it; empty for the model of the flags."""
        model = self._schedulers.model
        return "" if model is None else model.directory

    def check_name(self, name: str) -> None:
        """Raise `NotFoundError` unless `name` is empty or names the model or one of its adapters.

        Before a scheduler has connected, the router knows no adapters, and refuses their names.
        """
        if name in ("", self.name):
            return
        if not self.has_adapter(name):
            raise ModelNotFoundError(name, self.names())

    def info(self, name: str = "") -> Model:
        """Return the model or adapter with this name.

        Raises `NotFoundError` for an unknown name, and `UnavailableError` before a scheduler
        connects.
        """
        self.check_name(name)
        model = self._schedulers.model
        if model is None:
            raise self._schedulers.unavailable()
        adapter = None if name in ("", self.name) else self._adapters()[name]
        # The scheduler's limit counts an output token, which a model for embeddings never produces.
        num_unused = not model.abilities.generates
        return Model(
            self.name if adapter is None else adapter.name,
            model.max_model_len - num_unused,
            model.vocab_size,
            model.eos_token_ids,
            model.structured_output,
            parent="" if adapter is None else self.name,
            adapter=adapter,
            abilities=model.abilities,
        )

    def infos(self) -> tuple[Model, ...]:
        """Return the model, then its adapters; empty before a scheduler has connected."""
        if self._schedulers.model is None:
            return ()
        return tuple(map(self.info, self.names()))

    def names(self) -> tuple[str, ...]:
        """Return the names that requests may use: the model's, then its adapters'."""
        return (self.name, *self._adapters())

    def has_adapter(self, name: str) -> bool:
        """Whether the schedulers' latest reports include an adapter of this name."""
        return name in self._adapters()

    def has(self, name: str, digest: bytes) -> bool:
        """Whether requests can use an adapter that has this name and this digest."""
        return self._adapters().get(name) == LoraAdapter(name, digest)

    def _adapters(self) -> Mapping[str, LoraAdapter]:
        """Return the adapters by name, except an adapter with the model's name."""
        model = self._schedulers.model
        if model is None:
            return _NO_ADAPTERS
        return {a.name: a for a in model.adapters if a.name != self.name}
