"""Which part of a model each rank of a group holds: its share of each layer, its layers.

A *rank* is one process and its device. Ranks of one *stage* hold the same layers and share each of
them out; stages follow one another. Rank 0 is in the last stage, because there tokens are sampled,
and it is rank 0 that talks to the scheduler.
"""

from dataclasses import dataclass

from gpu_worker.weights.json_fields import ModelError


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in its group; without arguments that of a process on its own."""

    rank: int = 0
    """In [0, num_ranks)."""
    tensor_size: int = 1
    """Ranks that share out each layer."""
    pipeline_size: int = 1
    """Stages."""

    @property
    def num_ranks(self) -> int:
        """Of the group."""
        return self.tensor_size * self.pipeline_size

    @property
    def tensor_rank(self) -> int:
        """Its number within its stage."""
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        """Its stage; 0 has the first layers."""
        return self.pipeline_size - 1 - self.rank // self.tensor_size

    @property
    def is_first_stage(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the last norm and scores the vocabulary."""
        return self.stage == self.pipeline_size - 1

    @property
    def previous_rank(self) -> int:
        """Who sends it hidden states, unless it is in the first stage."""
        return self.rank + self.tensor_size

    @property
    def next_rank(self) -> int:
        """Whom it sends hidden states, unless it is in the last stage."""
        return self.rank - self.tensor_size

    def layers(self, num_layers: int) -> range:
        """Its layers of the model's; as many as any other stage's, or one more or less.

        Raises:
            ModelError: there are fewer layers than stages.
        """
        if num_layers < self.pipeline_size:
            raise ModelError(
                f"pipeline-parallel-size is {self.pipeline_size}; the model has {num_layers}"
                " layers, and a stage needs one"
            )
        size = self.pipeline_size
        return range(num_layers * self.stage // size, num_layers * (self.stage + 1) // size)

    def share(self, name: str, count: int) -> range:
        """Its share of `count` things of a layer that config.json calls `name`.

        Raises:
            ModelError: they cannot be shared out evenly.
        """
        if count % self.tensor_size:
            raise ModelError(
                f"tensor-parallel-size is {self.tensor_size}; it must divide {name}, {count}"
            )
        return self.groups(count)

    def share_or_repeat(self, name: str, count: int) -> range:
        """As `share`; but where there are fewer than ranks, several have the same one.

        Raises:
            ModelError: neither divides the other.
        """
        if count % self.tensor_size and self.tensor_size % count:
            raise ModelError(
                f"tensor-parallel-size is {self.tensor_size}; it must divide {name}, {count}, or"
                " be a multiple of it"
            )
        return self.groups(count)

    def groups(self, count: int) -> range:
        """Its part of `count`, which `share` or `share_or_repeat` has taken for good."""
        start = count * self.tensor_rank // self.tensor_size
        return range(start, start + max(1, count // self.tensor_size))

    def vocabulary(self, vocab_size: int) -> range:
        """The tokens that it scores: as many as any other rank, but for the last, which has less.

        It may be none.
        """
        count = -(-vocab_size // self.tensor_size)
        start = min(count * self.tensor_rank, vocab_size)
        return range(start, min(start + count, vocab_size))
