import numpy as np
import pytest
import torch

from kernels.cpu.ops import draw
from kernels.reference.draw import draw as twin
from tests.kernels.tensors import far_apart, strided

KINDS = ["plain", "peaked", "few values", "all equal", "mostly suppressed", "one left"]
SIZES = [1, 7, 16, 255, 256, 4096, 5003, 300_000]  # the last one needs tiles wider than the minimum


def make_logits(kind, num_seqs, num_tokens):
    logits = strided((num_seqs, num_tokens), torch.float32, "cpu")
    match kind:
        case "peaked":
            return logits.mul_(40)
        case "few values":
            return logits.round_()
        case "all equal":
            return logits.fill_(2.5)
        case "mostly suppressed":
            return logits.masked_fill_(torch.rand_like(logits) < 0.99, -torch.inf)
        case "one left":
            kept = torch.arange(num_seqs) * 7919 % num_tokens
            return logits.masked_fill_(torch.arange(num_tokens) != kept[:, None], -torch.inf)
    return logits.mul_(4)


def parameters(num_draws):
    generator = np.random.default_rng(0)
    temperature = generator.choice([1e-30, 0.3, 1.0, 4.0], num_draws).astype(np.float32)
    return torch.from_numpy(temperature), torch.from_numpy(generator.random(num_draws))


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_the_twin_s_and_leave_the_logits(kind, num_tokens):
    logits = make_logits(kind, 23, num_tokens)
    places = torch.tensor([22, 0, *range(3, 18)])
    given = logits, places, *parameters(len(places))
    before = logits.clone()
    assert draw(*given).tolist() == twin(*given).tolist()
    assert torch.equal(logits, before)


def test_a_row_draws_the_same_alone_and_in_a_batch_that_two_threads_share():
    logits = make_logits("plain", 16, 20_000)
    temperature, uniform = parameters(16)
    together = draw(logits, torch.arange(16), temperature, uniform)
    for row in range(16):
        one = slice(row, row + 1)
        alone = draw(logits[one], torch.arange(1), temperature[one], uniform[one])
        assert alone == together[row]


@pytest.mark.parametrize("function", [draw, twin], ids=["native", "twin"])
def test_a_token_without_weight_is_never_drawn(function):
    logits = torch.full((6, 1000), -torch.inf)
    logits[0, 999] = logits[1, 0] = logits[2, 511] = logits[3, 512] = -3.0
    logits[4:, 7] = 0.0
    logits[4:, 900] = torch.tensor([-80.0, -200.0])  # all but none, and none
    ones = torch.ones(6)
    for uniform in (0.0, 1 - 2.0**-53):
        drawn = function(
            logits, torch.arange(6), ones, torch.full((6,), uniform, dtype=torch.float64)
        )
        assert drawn.tolist() == [999, 0, 511, 512, 7, 7]


@pytest.mark.parametrize("function", [draw, twin], ids=["native", "twin"])
def test_a_row_that_is_no_distribution_gives_some_token(function):
    logits = torch.full((4, 70), -torch.inf)
    logits[1] = torch.nan
    logits[2] = torch.inf
    logits[3, 5], logits[3, 6] = torch.nan, 1.0
    drawn = function(logits, torch.arange(4), torch.ones(4), torch.full((4,), 0.5).double())
    assert ((drawn >= 0) & (drawn < 70)).all()


def test_draws_follow_the_weights():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.0, 0.125, 0.125]]))
    uniform = torch.arange(0, 1, 1 / 64).double()
    count = len(uniform)
    drawn = draw(logits, torch.zeros(count, dtype=torch.int64), torch.ones(count), uniform + 1e-4)
    assert np.bincount(drawn).tolist() == [32, 16, 0, 8, 8]


def test_rows_that_lie_far_apart():
    logits = far_apart((3, 64), torch.float32, "cpu")
    given = torch.tensor([2]), torch.ones(1), torch.full((1,), 0.7).double()
    assert draw(logits, *given) == twin(logits, *given)


def test_no_row_draws_no_token():
    none = torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0).double()
    assert draw(torch.zeros(2, 5), *none).tolist() == []


def test_a_mismatch_is_named():
    logits, places = torch.zeros(2, 64), torch.tensor([1])
    one, half = torch.ones(1), torch.full((1,), 0.5).double()
    with pytest.raises(ValueError, match=r"logits has dtype torch\.bfloat16"):
        draw(logits.bfloat16(), places, one, half)
    with pytest.raises(ValueError, match=r"places has dtype torch\.int32"):
        draw(logits, places.int(), one, half)
    with pytest.raises(ValueError, match=r"temperature has shape \(2,\); it must be \(1,\)"):
        draw(logits, places, torch.ones(2), half)
    with pytest.raises(ValueError, match=r"uniform has dtype torch\.float32"):
        draw(logits, places, one, half.float())
