"""The model of a scheduler, and whether it matches the tokenizer and the other schedulers."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, replace

from contract.lora import LoraAdapter
from contract.pooling import Pooling, Task


@dataclass(frozen=True, slots=True)
class SchedulerModel:
    """The model of a scheduler's workers."""

    id: str
    """The name at the workers; clients use the router's name."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    structured_output: bool = False
    adapters: tuple[LoraAdapter, ...] = ()
    directory: str = ""
    """The model's directory, if an operator loaded it; empty: the model of the flags."""
    tasks: tuple[Task, ...] = (Task.GENERATE,)
    embedding_size: int = 0
    """How many numbers its vectors have; 0: it makes none."""
    pooling: Pooling | None = None
    """How it makes a vector by default; None: it makes none."""

    def __str__(self) -> str:
        """Show the fields in which two models may differ."""
        if not self.adapters:
            return f"{self.id!r} from {self.directory}" if self.directory else repr(self.id)
        names = ", ".join(f"{a.name!r} {a.digest.hex()[:8]}" for a in self.adapters)
        return f"{self.id!r} with LoRA adapters {names}"

    def can_continue(self, other: "SchedulerModel") -> bool:
        """Whether outputs of `other` can continue with this model.

        Outputs of an adapter that has gone or changed cannot: the scheduler refuses these.
        """
        return self.can_stand_beside(replace(other, adapters=self.adapters))

    def can_stand_beside(self, other: "SchedulerModel") -> bool:
        """Whether schedulers with these models can share requests."""
        one, two = (replace(each, max_model_len=0, adapters=()) for each in (self, other))
        name_to_digest = {each.name: each.digest for each in self.adapters}
        return one == two and all(
            name_to_digest.get(each.name, each.digest) == each.digest for each in other.adapters
        )


def misfit_of(
    model: SchedulerModel,
    target: str,
    num_token_ids: int,
    others: Iterable[SchedulerModel | None],
) -> str | None:
    """Return why the router cannot serve the model of the scheduler at `target`, else None.

    `num_token_ids` is the size of the tokenizer's vocabulary; `others` are the known models of the
    other schedulers.
    """
    if num_token_ids > model.vocab_size:
        return (
            f"the router's tokenizer has {num_token_ids} token ids, but the model"
            f" {model.id!r} of the scheduler at {target} has a vocabulary of"
            f" {model.vocab_size}: --model must name the directory of the served model"
        )
    for other in others:
        if other is not None and not model.can_stand_beside(other):
            return f"the scheduler at {target} has the model {model}; the others have {other}"
    return None


def together(models: Iterable[SchedulerModel | None]) -> SchedulerModel:
    """Combine the models of schedulers: all adapters, and the smallest length limit."""
    known = [model for model in models if model is not None]
    adapters = {adapter.name: adapter for model in known for adapter in model.adapters}
    return dataclasses.replace(
        min(known, key=lambda model: model.max_model_len),
        adapters=tuple(adapters[name] for name in sorted(adapters)),
    )
