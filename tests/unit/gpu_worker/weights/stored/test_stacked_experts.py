"""Stacked experts appear one by one, in whichever order the checkpoint has their dimensions."""

from pathlib import Path

import pytest
import torch

from gpu_worker.weights.stored.stacked_experts import ExpertsFile
from gpu_worker.weights.tensor_file import Extent, Piece

NUM_EXPERTS, HIDDEN, SIZE = 3, 256, 384
EXPERTS = "model.layers.0.mlp.experts"


class File:
    """A file in memory."""

    path = Path("model.safetensors")

    def __init__(self, tensors):
        self._tensors = tensors
        self.names = list(tensors)

    def shape(self, name):
        return tuple(self._tensors[name].shape)

    def tensor(self, piece):
        assert self.shape(piece.name) == piece.shape
        return self._tensors[piece.name][piece.where]

    def extent(self, piece):
        return Extent(self.path, 0, range(piece.where[0].start, piece.where[0].stop))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_each_expert_s_maps(is_transposed):
    stacked = {
        "gate_up_proj": torch.rand(NUM_EXPERTS, 2 * SIZE, HIDDEN),
        "down_proj": torch.rand(NUM_EXPERTS, HIDDEN, SIZE),
        "gate_up_proj_scale_inv": torch.rand(NUM_EXPERTS, 2 * SIZE // 128, HIDDEN // 128),
        "down_proj_scale_inv": torch.rand(NUM_EXPERTS, HIDDEN // 128, SIZE // 128),
    }
    gate = torch.rand(NUM_EXPERTS, HIDDEN)
    tensors = {
        f"{EXPERTS}.{name}": tensor.transpose(1, 2) if is_transposed else tensor
        for name, tensor in stacked.items()
    }
    file = ExpertsFile(File(tensors | {"model.layers.0.mlp.gate.weight": gate}), HIDDEN)
    assert len(file.names) == 1 + NUM_EXPERTS * 2 * 3

    def read(name, *where):
        return file.tensor(Piece(name, file.shape(name), where))

    assert torch.equal(read("model.layers.0.mlp.gate.weight"), gate)
    for index in range(NUM_EXPERTS):
        for end in ("", "_scale_inv"):
            first, second = stacked[f"gate_up_proj{end}"][index].chunk(2)
            name = f"{EXPERTS}.{index}"
            assert torch.equal(read(f"{name}.gate_proj.weight{end}"), first)
            assert torch.equal(read(f"{name}.up_proj.weight{end}"), second)
            down = stacked[f"down_proj{end}"][index]
            assert torch.equal(read(f"{name}.down_proj.weight{end}"), down)
    up = f"{EXPERTS}.1.up_proj.weight"
    rows, columns = slice(32, 64), slice(128, None)
    expected = stacked["gate_up_proj"][1, SIZE:]
    assert torch.equal(read(up, rows), expected[rows])
    assert torch.equal(read(up, slice(None), columns), expected[:, columns])
    assert file.extent(Piece(up, file.shape(up))).bytes == range(1, 2), "read ahead: one expert"


@pytest.mark.parametrize(("stack", "part"), [("gate_up", "gate"), ("down", "down")])
def test_a_shape_that_fits_both_orders_is_read_as_by_transformers(stack, part):
    square = torch.rand(1, HIDDEN, HIDDEN)
    file = ExpertsFile(File({f"{EXPERTS}.{stack}_proj": square}), HIDDEN)
    name = f"{EXPERTS}.0.{part}_proj.weight"
    shape = file.shape(name)
    assert torch.equal(file.tensor(Piece(name, shape)), square[0, : shape[0]])
