"""Pooling, which turns a prompt into a vector (an embedding or a score); the tasks of a model."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from contract.errors import UnimplementedError
from contract.value_checks import check_range


class Task(StrEnum):
    """The tasks that a model can do with a prompt."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


class PoolingKind(StrEnum):
    """Which hidden states become the vector."""

    LAST = "last"
    """The last token's hidden state."""
    MEAN = "mean"
    """The mean of all tokens' hidden states."""
    CLS = "cls"
    """The first token's hidden state."""
    SCORE = "score"
    """The score that the model's classification head computes from the first token's state."""


@dataclass(frozen=True, slots=True)
class Pooling:
    kind: PoolingKind
    normalize: bool = False
    """Whether to scale the vector to length 1."""
    dimensions: int | None = None
    """How many of the vector's first numbers to keep; None: all. `normalize` scales what is kept.
    """
    num_first_tokens: int = 0
    """For a pair of texts: how many tokens the first text has, special tokens included."""

    @property
    def needs_all(self) -> bool:
        """Whether the pooling needs the hidden states of tokens other than the last."""
        return self.kind is not PoolingKind.LAST


@dataclass(frozen=True, slots=True)
class Abilities:
    """The tasks that a model can do, and the vectors that it makes."""

    tasks: tuple[Task, ...] = (Task.GENERATE,)
    embedding_size: int = 0
    """How many numbers a vector of this model has; 0: the model makes no vectors."""
    pooling: Pooling | None = None
    """How the model makes a vector by default; None: the model makes no vectors."""

    @property
    def generates(self) -> bool:
        """Whether the model generates tokens. Otherwise it is an encoder, which keeps no KV."""
        return Task.GENERATE in self.tasks

    def check(self, pooling: Pooling | None, model_id: str) -> None:
        """Check that the model can do what a request asks.

        The request asks for `pooling`. If `pooling` is None, it asks for generated tokens.

        Raises:
            UnimplementedError: The model cannot do the task.
            InvalidArgumentError: The model's vectors have fewer than `pooling.dimensions` numbers.
        """
        task = Task.GENERATE
        if pooling is not None:
            task = Task.SCORE if pooling.kind is PoolingKind.SCORE else Task.EMBED
        if task not in self.tasks:
            can = ", ".join(self.tasks)
            raise UnimplementedError(f"model {model_id!r} cannot {task}; it can {can}")
        if pooling is not None and pooling.dimensions is not None:
            check_range("dimensions", pooling.dimensions, 1, self.embedding_size)


ONLY_GENERATES: Final = Abilities()
