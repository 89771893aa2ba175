import pytest
import torch

from kernels import reference
from kernels.triton.greedy import greedy
from tests.kernels.tensors import far_apart, strided
from tests.kernels.tolerance import every_dtype


@every_dtype
@pytest.mark.parametrize("num_tokens", [1, 500, 2048, 5001])
def test_it_is_the_first_maximum_of_a_finite_row(num_tokens, dtype, device):
    logits = strided((4, num_tokens), dtype, device)
    logits[1] = -3.0  # all equal
    logits[2, num_tokens // 2 :] = logits[2].max()  # several maxima, perhaps in several tiles
    assert [each.tolist() for each in greedy(logits)] == [
        each.tolist() for each in reference.greedy(logits)
    ]


def test_rows_that_are_not_finite_are_known_wherever_the_number_is(device):
    logits = torch.randn(8, 5000, device=device)
    for row, (token, value) in enumerate(
        [(0, "nan"), (2500, "inf"), (4999, "-inf"), (4096, "nan"), (1, "inf")]
    ):
        logits[row, token] = float(value)
    logits[5] = float("nan")
    logits[6] = torch.finfo(torch.float32).min
    tokens, is_finite = greedy(logits)
    assert is_finite.tolist() == [False] * 6 + [True] * 2
    assert is_finite.tolist() == reference.greedy(logits)[1].tolist()
    assert ((tokens >= 0) & (tokens < 5000)).all()
    assert tokens[6:].tolist() == [0, logits[7].argmax()]


def test_rows_reach_past_int32_offsets(device):
    logits = far_apart((3, 40), torch.float16, device)
    assert greedy(logits)[0].tolist() == logits.argmax(1).tolist()


def test_what_does_not_fit_is_named(device):
    with pytest.raises(ValueError, match="logits has 1 dimensions"):
        greedy(torch.randn(5, device=device))
