"""The tolerance table: how far a kernel may differ from its twin, by dtype."""

import pytest
import torch

# Kernel and twin sum in different orders, and the twin rounds every product to the dtype, the
# kernel only the sum: they differ by a few units in the last place. Triton's interpreter truncates
# to bf16.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.float16: {"rtol": 4e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1.6e-2},
}

every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)

# Triton's interpreter multiplies the bit patterns of bf16 in tl.dot: that case needs a GPU.
every_dot_dtype = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(
                not torch.cuda.is_available(), reason="the interpreter cannot multiply bf16"
            ),
        ),
    ],
    ids=str,
)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, **TOLERANCES[expected.dtype])
