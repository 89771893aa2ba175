"""Which part of a model each rank holds: which layers, and which share of each layer.

A *rank* is one process and its device. The ranks of one *stage* hold the same layers and split each
of them; stages run one after another. Rank 0 is in the last stage, because tokens are sampled
there, and rank 0 talks to the scheduler.
"""

from dataclasses import dataclass
from typing import Final

from model_files.errors import ModelError


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank a process is, and how a model is split. The default is a single process."""

    rank: int = 0
    """In [0, num_ranks)."""
    tensor_size: int = 1
    """Number of ranks that split each layer."""
    pipeline_size: int = 1
    """Number of stages."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that hold the model together."""
        return self.tensor_size * self.pipeline_size

    @property
    def tensor_rank(self) -> int:
        """The rank's number within its stage."""
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        """The rank's stage; stage 0 has the first layers."""
        return self.pipeline_size - 1 - self.rank // self.tensor_size

    @property
    def is_first_stage(self) -> bool:
        """Whether the rank holds the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank holds the final norm and the head."""
        return self.stage == self.pipeline_size - 1

    @property
    def previous_rank(self) -> int:
        """The rank that sends hidden states to this rank. Not valid in the first stage."""
        return self.rank + self.tensor_size

    @property
    def next_rank(self) -> int:
        """The rank to which this rank sends hidden states. Not valid in the last stage."""
        return self.rank - self.tensor_size

    def layers(self, num_layers: int) -> range:
        """Return this rank's layers; the sizes of stages differ by at most one layer.

        Raises:
            ModelError: There are fewer layers than stages.
        """
        if self.pipeline_size > max(1, num_layers):
            raise ModelError(
                f"pipeline-parallel-size is {self.pipeline_size}; the model has {num_layers}"
                " layers, and each stage needs one"
            )
        size = self.pipeline_size
        return range(num_layers * self.stage // size, num_layers * (self.stage + 1) // size)

    def share(self, name: str, count: int) -> range:
        """Return which of a layer's `count` parts, such as heads, this rank holds.

        `name` is the field of config.json that has the count; an error names this field.

        Raises:
            ModelError: The ranks of a stage cannot split the parts evenly.
        """
        if count % self.tensor_size:
            raise ModelError(
                f"tensor-parallel-size is {self.tensor_size}; it must divide {name}, {count}"
            )
        return self.groups(count)

    def share_or_repeat(self, name: str, count: int) -> range:
        """Do as `share` does, but if there are fewer parts than ranks, several ranks share a part.

        Raises:
            ModelError: Neither `count` nor the number of the stage's ranks divides the other.
        """
        if count % self.tensor_size and self.tensor_size % count:
            raise ModelError(
                f"tensor-parallel-size is {self.tensor_size}; it must divide {name}, {count}, or"
                " be a multiple of it"
            )
        return self.groups(count)

    def groups(self, count: int) -> range:
        """Return this rank's share of `count` parts, as `share` and `share_or_repeat` do.

        One of these two methods must have accepted `count`.
        """
        start = count * self.tensor_rank // self.tensor_size
        return range(start, start + max(1, count // self.tensor_size))

    def features(self, num_groups: int, size: int, start: int = 0) -> range:
        """Return the inputs or outputs of a linear map that this rank has.

        They are the features of `groups(num_groups)`. A group, such as a head, has `size` features,
        and the first group begins at the feature `start`.
        """
        groups = self.groups(num_groups)
        return range(start + groups.start * size, start + groups.stop * size)

    def vocabulary(self, vocab_size: int) -> range:
        """Return the token ids whose logits this rank computes; the last ranks may get fewer."""
        count = -(-vocab_size // self.tensor_size)
        start = min(count * self.tensor_rank, vocab_size)
        return range(start, min(start + count, vocab_size))


ALONE: Final = Place()
"""The `Place` of a process that holds the whole model."""
