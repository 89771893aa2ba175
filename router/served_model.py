"""The one model that the router serves: its name, and the limits that the schedulers tell."""

from router.domain import ModelInfo
from router.schedulers import Schedulers
from rpc.errors import NotFoundError


class ServedModel:
    """Every method that takes a `name` accepts "" for the model, since it is the only one."""

    def __init__(self, name: str, schedulers: Schedulers) -> None:
        self.name = name
        self._schedulers = schedulers

    def check_name(self, name: str) -> None:
        """Raises `NotFoundError` unless it is the model's."""
        if name not in ("", self.name):
            raise NotFoundError(f"model {name[:128]!r} is not served; {self.name!r} is")

    def info(self, name: str = "") -> ModelInfo:
        """The model of this name, with its limits.

        Raises `NotFoundError` unless it is the model's; `UnavailableError` until a scheduler has
        told the limits.
        """
        self.check_name(name)
        model = self._schedulers.model
        if model is None:
            raise self._schedulers.unavailable()
        return ModelInfo(
            self.name,
            model.max_model_len,
            model.vocab_size,
            model.eos_token_ids,
            model.structured_output,
        )

    def infos(self) -> tuple[ModelInfo, ...]:
        """All models served: this one, or none until its limits are known."""
        return () if self._schedulers.model is None else (self.info(),)
