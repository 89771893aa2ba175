"""Collectives: the ranks' exchanges during a step, over `torch.distributed`.

Every rank makes the same calls in the same order. On CUDA, calls that return values to the host use
gloo. All other calls on CUDA use NCCL, and return before the device is done. On a CPU, all calls
use gloo.

Symbols: `T` tokens, `S` sequences, `E` hidden size, `K` input features, `N` output features.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.nn import functional

from contract.arrays import BoolArray
from gpu_worker.ranks.shards import Place

RowMap: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps `[T, K]` to `[T, N]`, such as a `Linear`."""


@dataclass(frozen=True, slots=True, eq=False)
class SummedMap:
    """A map `[T, K]` to `[T, N]` that sums the results of `part` over the ranks of a stage."""

    part: RowMap
    """This rank's part of the map. It takes this rank's share of the input features."""
    group: dist.ProcessGroup | None
    """The ranks of the stage."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum to every rank of the stage."""
        out = self.part(x).contiguous()
        dist.all_reduce(out, group=self.group)
        return out


def open_store(address: str) -> tuple[Store, int]:
    """Open the store by which ranks find each other; return it and its port. Only for rank 0."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, 0), family=family)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def find_store(address: str, port: int) -> Store:
    """Connect to rank 0's store."""
    return TCPStore(address, port, wait_for_workers=False)


class Ranks:
    """This rank's connections to the other ranks. Called from one thread at a time."""

    def __init__(self, place: Place, store: Store, device: torch.device) -> None:
        """Connect, and wait until all ranks are connected.

        Args:
            place: This rank's place.
            store: How the ranks find each other.
            device: This rank's device, of the same type in all ranks.
        """
        self.place = place
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.num_ranks,
            device_id=device if device.type == "cuda" else None,
        )
        self._host = dist.new_group(backend="gloo") if device.type == "cuda" else None
        self._stage: dist.ProcessGroup | None = None
        for first in range(0, place.num_ranks, place.tensor_size):
            group = dist.new_group(list(range(first, first + place.tensor_size)))
            if first <= place.rank < first + place.tensor_size:
                self._stage = group

    def summed(self, part: RowMap) -> "SummedMap":
        """Make a map `[T, K]` to `[T, N]` that sums the results of `part` over the stage's ranks.

        Every rank of the stage gets the sum.
        """
        return SummedMap(part, self._stage)

    def joined(self, part: RowMap, num_out: int) -> RowMap:
        """Make a map `[S, K]` to `[S, num_out]` that joins the results of the stage's ranks.

        `part` computes this rank's share of the outputs (`Place.vocabulary`). Every rank of the
        stage gets all outputs.
        """
        size = self.place.tensor_size
        width = -(-num_out // size)

        def apply(x: torch.Tensor) -> torch.Tensor:
            own = part(x)  # [S, width], or fewer in the last ranks
            own = functional.pad(own, (0, width - own.shape[1])).contiguous()
            parts = own.new_empty(size, *own.shape)
            dist.all_gather(list(parts.unbind()), own, group=self._stage)
            return parts.transpose(0, 1).flatten(1)[:, :num_out].contiguous()

        return apply

    def send_on(self, hidden: torch.Tensor) -> None:
        """Send hidden states `[T, E]` to the next stage."""
        dist.send(hidden.contiguous(), self.place.next_rank)

    def receive(self, num_tokens: int, like: torch.Tensor) -> torch.Tensor:
        """Receive hidden states `[num_tokens, E]` from the previous stage.

        `like` is a tensor `[E]` with the dtype and the device that the hidden states will have.
        """
        hidden = like.new_empty(num_tokens, like.shape[0])
        dist.recv(hidden, self.place.previous_rank)
        return hidden

    def share(self, values: torch.Tensor) -> None:
        """Overwrite `values`, a tensor on the device, with rank 0's values."""
        dist.broadcast(values, 0)

    def least(self, *values: float) -> list[float]:
        """Return the minimum over ranks of each value, on the host."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def total(self, *values: float) -> list[float]:
        """Return the sum over ranks of each value, on the host."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def any_has(self, flags: BoolArray) -> BoolArray:
        """Return bool[N] on the host: the flags that at least one rank has set."""
        reduced = torch.from_numpy(flags.astype(np.uint8))
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self._host)
        return reduced.numpy().astype(np.bool_)

    def _reduced(
        self, values: Sequence[float], operation: "dist.ReduceOp.RedOpType"
    ) -> list[float]:
        reduced = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(reduced, operation, group=self._host)
        result: list[float] = reduced.tolist()
        return result
