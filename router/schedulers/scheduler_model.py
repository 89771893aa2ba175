"""Compares a scheduler's model with the tokenizer and with the models of other schedulers."""

from collections.abc import Iterable
from dataclasses import replace

from contract.info import ModelInfo


def can_continue(model: ModelInfo, earlier: ModelInfo) -> bool:
    """Whether `model` can continue the outputs that the model `earlier` has begun.

    Adapters are not compared, because the scheduler itself refuses a request whose adapter is gone
    or has changed.
    """
    return can_share(model, replace(earlier, adapters=model.adapters))


def can_share(model: ModelInfo, other: ModelInfo) -> bool:
    """Whether a request can go to either of two schedulers that have these models."""
    one, two = (replace(each, max_model_len=0, adapters=()) for each in (model, other))
    name_to_digest = {each.name: each.digest for each in model.adapters}
    return one == two and all(
        name_to_digest.get(each.name, each.digest) == each.digest for each in other.adapters
    )


def misfit_of(
    model: ModelInfo,
    target: str,
    num_token_ids: int,
    others: Iterable[ModelInfo | None],
) -> str | None:
    """Return why the router cannot serve `model` of the scheduler at `target`; None: it can.

    `num_token_ids` is the size of the tokenizer's vocabulary; `others` are the known models of the
    other schedulers.
    """
    if num_token_ids > model.vocab_size:
        return (
            f"the router's tokenizer has {num_token_ids} token ids, but the model"
            f" {model.id!r} of the scheduler at {target} has a vocabulary of"
            f" {model.vocab_size}: --model must name the served model"
        )
    for other in others:
        if other is not None and not can_share(model, other):
            return f"the scheduler at {target} has {model}; the others have {other}"
    return None


def together(models: Iterable[ModelInfo | None]) -> ModelInfo:
    """Combine the models of schedulers: all adapters, and the smallest length limit."""
    known = [model for model in models if model is not None]
    adapters = {adapter.name: adapter for model in known for adapter in model.adapters}
    return replace(
        min(known, key=lambda model: model.max_model_len),
        adapters=tuple(adapters[name] for name in sorted(adapters)),
    )
