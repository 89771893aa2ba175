"""Activations are those of transformers, and a row's bits depend on no other row."""

import pytest
import torch
from transformers.activations import ACT2FN

from gpu_worker.models.activations import ACTIVATIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_row_has_the_same_bits_alone(name, dtype):
    activation = ACTIVATIONS[name]
    x = 3 * torch.randn(40, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = activation(x)
    torch.testing.assert_close(together, ACT2FN[name](x.float()).to(dtype))
    for row, expected in zip(x, together, strict=True):
        assert torch.equal(activation(row.clone()), expected)
