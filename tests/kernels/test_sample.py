import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from contract.sampling import SamplingParams
from gpu_worker.sampling.draw import draw, uniforms
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.truncation import truncate
from kernels import reference
from kernels.reference.sample import uniforms as twin_uniforms
from kernels.triton.candidates import TOKENS, gather_candidates
from kernels.triton.sample import sample

VOCABULARY = 5003  # three tiles, the last not whole


def parameters(num_seqs, vocab_size, device):
    """Every filter alone and combined, at the ends of its range and between them."""
    rows = [
        (1.0, vocab_size, 1.0, 0.0),
        (0.7, 1, 1.0, 0.0),
        (1.0, 40, 1.0, 0.0),
        (1.3, vocab_size, 0.9, 0.0),
        (1.0, vocab_size, 1e-9, 0.0),
        (2.0, vocab_size - 1, 0.999999, 0.0),
        (1.0, vocab_size, 1.0, 0.05),
        (0.9, 50, 0.8, 0.02),
        (1e-30, vocab_size, 0.5, 1.0),
    ]
    rows = [rows[seq % len(rows)] for seq in range(num_seqs)]
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return (
        torch.tensor(temperature, device=device),
        torch.tensor(top_k, device=device).clamp(1, vocab_size),
        torch.tensor(top_p, dtype=torch.float64, device=device),
        torch.tensor(min_p, device=device),
        torch.randint(-(2**63), 2**63 - 1, (num_seqs,), device=device),
        torch.randint(0, 2**20, (num_seqs,), device=device),
    )


def worker_sample(logits, temperature, top_k, top_p, min_p, seeds, positions):
    """The worker's sampling on a CPU."""
    maximum = logits.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    scaled = (logits - maximum) / temperature.unsqueeze(1)
    weights = scaled.exp()
    truncate(scaled, weights, top_k.numpy(), top_p.numpy(), min_p.numpy())
    chosen = uniforms(seeds.numpy().view(np.uint64), positions.numpy())
    return draw(weights, torch.from_numpy(chosen))


def make_logits(kind, num_seqs, vocab_size, device):
    logits = torch.randn(num_seqs, vocab_size + 3, device=device)[:, :vocab_size] * 4
    if kind == "bf16":  # ties, as a model in bfloat16 gives them
        return logits.bfloat16().float()
    if kind == "few values":
        return logits.div(4).round()
    if kind == "all equal":
        return torch.full_like(logits, 2.5)
    if kind == "mostly suppressed":
        return logits.masked_fill(torch.rand_like(logits) < 0.999, float("-inf"))
    return logits


KINDS = ["plain", "bf16", "few values", "all equal", "mostly suppressed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 7, VOCABULARY])
def test_the_kernel_draws_the_twin_s_tokens(kind, vocab_size, device):
    logits = make_logits(kind, 18, vocab_size, device)
    given = parameters(18, vocab_size, device)
    before = logits.clone()
    assert torch.equal(sample(logits, *given), reference.sample(logits, *given))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(50, 1.0), (VOCABULARY, 0.9), (VOCABULARY, 0.999), (300, 1.0), (VOCABULARY, 1e-9)],
)
def test_only_tokens_that_may_be_kept_are_gathered(top_k, top_p, device):
    logits = make_logits("plain", 5, VOCABULARY, device)
    temperature, cut, share, min_p, _, _ = parameters(5, VOCABULARY, device)
    cuts = cut.fill_(top_k), share.fill_(top_p), min_p
    candidates = gather_candidates(logits, logits.amax(1), temperature.fill_(1), *cuts)
    num_gathered = candidates.ends[:, -1]
    by_weight = logits.double().softmax(1).sort(1, descending=True).values
    num_kept = ((by_weight.cumsum(1) < top_p).sum(1) + 1).clamp(max=top_k)
    assert (num_kept <= num_gathered).all()
    assert (num_gathered < 1.5 * num_kept + 20).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 7, VOCABULARY])
def test_the_twin_draws_what_the_worker_draws(kind, vocab_size):
    logits = make_logits(kind, 45, vocab_size, "cpu")
    given = parameters(45, vocab_size, "cpu")
    assert torch.equal(reference.sample(logits, *given), worker_sample(logits, *given))


def test_uniform_numbers_are_the_worker_s():
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345])
    positions = torch.tensor([0, 7, 2**31, 2**40, 3, 131_071])
    expected = uniforms(seeds.numpy().view(np.uint64), positions.numpy())
    assert twin_uniforms(seeds, positions).tolist() == expected.tolist()


@pytest.mark.parametrize("is_suppressed", [False, True])
def test_the_sampler_s_way_on_a_gpu_gives_the_tokens_of_that_on_a_cpu(is_suppressed):
    sampler = Sampler(8, 300, (), torch.device("cpu"))
    rows = np.array([5, 1, 6])
    for row, (top_k, top_p, seed) in zip(
        rows.tolist(), [(300, 0.8, 3), (20, 1.0, 2**63 + 5), (7, 0.5, 0)], strict=True
    ):
        params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, seed=seed)
        sampler.add(row, params, np.array([1], np.int32), 1)
    logits = make_logits("plain", 3, 300, "cpu")
    positions = np.array([4, 9, 2**33])
    places = np.arange(3)
    on_cpu = sampler._draw(logits, places, rows, positions, is_suppressed=is_suppressed)
    assert on_cpu.tolist() == sampler._draw_by_kernel(logits, places, rows, positions).tolist()


@pytest.mark.parametrize("draw_from", [sample, reference.sample])
def test_of_equally_likely_tokens_the_lower_ids_stay(draw_from, device):
    logits = torch.zeros(40, 10, device=device)
    *cuts, seeds, positions = parameters(40, 10, device)
    cuts[0].fill_(1.0)
    cuts[1].fill_(3)
    cuts[2].fill_(0.5)  # of three: two
    cuts[3].fill_(0.0)
    assert draw_from(logits, *cuts, seeds, positions).unique().tolist() == [0, 1]


@pytest.mark.parametrize("draw_from", [sample, reference.sample])
def test_a_row_that_is_no_distribution_gives_some_token(draw_from, device):
    logits = torch.full((9, 70), float("-inf"), device=device)
    logits[3:] = float("nan")
    logits[6:, :] = float("inf")
    tokens = draw_from(logits, *parameters(9, 70, device))
    assert ((tokens >= 0) & (tokens < 70)).all()


def test_a_row_does_not_depend_on_its_batch(device):
    logits = make_logits("plain", 9, 300, device)
    given = parameters(9, 300, device)
    together = sample(logits, *given)
    for seq in range(9):
        one = slice(seq, seq + 1)
        assert sample(logits[one], *(each[one] for each in given)) == together[seq]


def test_sample_names_what_does_not_fit(device):
    logits = torch.zeros(2, 5, device=device)
    given = parameters(2, 5, device)
    with pytest.raises(ValueError, match=r"top_p has dtype torch\.float32"):
        sample(logits, *given[:2], given[2].float(), *given[3:])
    with pytest.raises(ValueError, match=r"logits has dtype torch\.float64"):
        sample(logits.double(), *given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter does")
def test_threads_wait_for_each_other_once_a_pass_and_not_for_each_tile(monkeypatch):
    reductions = []
    apply = interpreter.ReduceOps.apply

    def count(self, *args):
        reductions.append(self)
        return apply(self, *args)

    monkeypatch.setattr(interpreter.ReduceOps, "apply", count)
    num_tiles = 20
    logits = make_logits("plain", 1, num_tiles * TOKENS, "cpu")
    _, _, _, min_p, seeds, positions = parameters(1, logits.shape[1], "cpu")
    ones = torch.ones(1)
    sample(logits, ones, torch.tensor([1000]), ones.double() * 0.9, min_p, seeds, positions)
    # candidates are gathered; after twenty passes over them there is a search for the token
    assert 0 < len(reductions) < 220 + 2 * num_tiles
