"""Whether schedulers' models fit the tokenizer and each other, and what they are together."""

import dataclasses
from collections.abc import Iterable

from router.schedulers.messages import SchedulerModel


def misfit_of(
    model: SchedulerModel,
    target: str,
    num_token_ids: int,
    others: Iterable[SchedulerModel | None],
) -> str | None:
    """Why the model of the scheduler at `target` cannot be served; None: it can.

    Args:
        model: the model.
        target: where its scheduler is.
        num_token_ids: of its tokenizer.
        others: the models of the other schedulers, as far as they are known.
    """
    if num_token_ids > model.vocab_size:
        return (
            f"the router's tokenizer has {num_token_ids} token ids, but the model"
            f" {model.id!r} of the scheduler at {target} has a vocabulary of"
            f" {model.vocab_size}: --model must name the directory of the model that is served"
        )
    for other in others:
        if other is not None and not model.can_stand_beside(other):
            return f"the scheduler at {target} has the model {model}; the others have {other}"
    return None


def together(models: Iterable[SchedulerModel | None]) -> SchedulerModel:
    """What schedulers of one model, one at least, take: any of their adapters, and what all can."""
    known = [model for model in models if model is not None]
    adapters = {adapter.name: adapter for model in known for adapter in model.adapters}
    return dataclasses.replace(
        min(known, key=lambda model: model.max_model_len),
        adapters=tuple(adapters[name] for name in sorted(adapters)),
    )
