"""Several processes train one model on a CPU: each computes a part of every batch.

On a shared machine, two processes of one thread each train three times as fast as one process of
two threads: processes synchronize once per step, but threads at every matrix product.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_RANK = "QUIRE_TRAIN_RANK"


class Ranks:
    """Rank 0 is the process that the user started; it starts the others with its own flags."""

    def __init__(self, world_size: int, work_dir: Path) -> None:
        self.rank = int(os.environ.get(_RANK, "0"))
        self.world_size = world_size
        self._others: list[subprocess.Popen[bytes]] = []
        if world_size == 1:
            return
        meeting_point = work_dir / "ranks"
        if self.rank == 0:
            meeting_point.unlink(missing_ok=True)
            self._others = [
                subprocess.Popen(  # noqa: S603 - ourselves
                    [sys.executable, *sys.argv],
                    env=os.environ | {_RANK: str(rank)},
                    start_new_session=True,  # only rank 0 handles signals
                )
                for rank in range(1, world_size)
            ]
        url = f"file://{meeting_point.absolute()}"
        dist.init_process_group("gloo", init_method=url, rank=self.rank, world_size=world_size)

    def agree(self, elapsed_s: float, *, stop: bool) -> tuple[float, bool]:
        """Return rank 0's values in every rank."""
        if self.world_size == 1:
            return elapsed_s, stop
        said = torch.tensor([elapsed_s, float(stop)], dtype=torch.float64)
        dist.broadcast(said, src=0)
        return said[0].item(), bool(said[1].item())

    def sum_gradients(self, parameters: Iterable[Tensor], loss: float) -> float:
        """Sum the gradients over the ranks, in place; return the sum of the losses."""
        if self.world_size == 1:
            return loss
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([torch.tensor([loss]), *(g.flatten() for g in gradients)])
        dist.all_reduce(flat)
        parts = flat[1:].split([g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        return flat[0].item()

    def close(self) -> None:
        """Wait for the other processes, which end by themselves."""
        if self.world_size > 1:
            dist.destroy_process_group()
        for other in self._others:
            other.wait()
