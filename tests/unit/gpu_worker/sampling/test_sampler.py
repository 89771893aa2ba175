from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_reference import (
    reference_logprobs,
    reference_probabilities,
    reference_token,
    reference_uniform,
)

from contract.sampling import SamplingParams
from gpu_worker.sampling.draw import draw, uniforms
from gpu_worker.sampling.sampled_tokens import Readback
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.truncation import truncate
from kernels import ops

CPU = torch.device("cpu")
EOS = (2, 7)


def sample_all(logits, all_params, prompts, outputs):
    """Sample every row in one batch, from a sampler that has just got the rows."""
    sampler = Sampler(len(all_params), logits.shape[1], EOS, CPU)
    for row, (params, prompt, output) in enumerate(zip(all_params, prompts, outputs, strict=True)):
        sampler.add(row, params, np.array(prompt + output, np.int32), len(prompt))
    return sample(sampler, logits, prompts, outputs)


def sample(sampler, logits, prompts, outputs):
    num_outputs = np.array([len(output) for output in outputs])
    num_prompt = np.array([len(prompt) for prompt in prompts])
    rows = np.arange(len(prompts))
    sampled = sampler.sample(logits.clone(), rows, num_prompt + num_outputs, num_outputs)
    return Readback(sampled).wait()


def random_params(rng, vocab_size):
    def maybe(value, default, chance=0.5):
        return value if rng.random() < chance else default

    biases = rng.choice(vocab_size, 5, replace=False)
    return SamplingParams(
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        temperature=maybe(float(np.float32(rng.choice([0.0, 0.3, 0.7, 1.5, 4.0]))), 1.0),
        top_k=maybe(int(rng.integers(1, vocab_size + 1)), 0),
        top_p=maybe(float(np.float32(rng.uniform(0.05, 0.999))), 1.0),
        min_p=maybe(float(np.float32(rng.choice([0.02, 0.3, 1.0]))), 0.0, 0.3),
        repetition_penalty=maybe(float(np.float32(rng.uniform(0.5, 2.0))), 1.0, 0.4),
        presence_penalty=maybe(float(np.float32(rng.uniform(-2, 2))), 0.0, 0.3),
        frequency_penalty=maybe(float(np.float32(rng.uniform(-2, 2))), 0.0, 0.3),
        logit_bias=maybe(
            {int(token): float(np.float32(rng.uniform(-5, 5))) for token in biases}, {}, 0.3
        ),
        min_tokens=maybe(int(rng.integers(0, 8)), 0),
        stop_token_ids=maybe((int(rng.integers(vocab_size)),), ()),
        ignore_eos=bool(rng.random() < 0.3),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9, "top_k": 5}])
def test_a_limited_row_draws_only_what_it_may(temperature, cut):
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)) * 4
    free = SamplingParams(temperature=temperature, seed=5, **cut)
    seen = set()
    for seed in range(40):
        allowed = (97, 3, 3, 41)
        limited = replace(free, seed=seed, allowed_token_ids=allowed)
        found = sample_all(logits, [free, limited, free], [[1]] * 3, [[]] * 3).token_ids
        alone = sample_all(logits[:1], [free], [[1]], [[]]).token_ids
        assert found[1] in allowed
        assert found[0] == alone[0], "other rows draw as before"
        seen.add(int(found[1]))
    best = max((97, 3, 41), key=lambda token: logits[1, token])
    assert seen == {best} if temperature == 0 else best in seen


@pytest.mark.parametrize(("vocab_size", "seed"), [(11, 0), (257, 1), (1500, 2), (3000, 3)])
def test_a_batch_of_random_configurations_equals_the_naive_reference(vocab_size, seed):
    rng = np.random.default_rng(seed)
    for _ in range(6):
        count = 24
        # Coarse values make ties, scale makes both flat and peaked distributions.
        scale = rng.choice([0.5, 3.0], size=(count, 1))
        values = np.round(rng.normal(size=(count, vocab_size)) * scale * 16) / 16
        logits = torch.from_numpy(values.astype(np.float32))
        all_params = [random_params(rng, vocab_size) for _ in range(count)]
        prompts = [
            rng.integers(vocab_size, size=rng.integers(1, 12)).tolist() for _ in range(count)
        ]
        outputs = [rng.integers(vocab_size, size=rng.integers(0, 9)).tolist() for _ in range(count)]
        sampled = sample_all(logits, all_params, prompts, outputs)
        expected = [
            reference_token(values[row], all_params[row], prompts[row], outputs[row], EOS)
            for row in range(count)
        ]
        assert sampled.token_ids.tolist() == expected
        assert sampled.is_finite.all()


def test_a_row_draws_the_same_alone_and_in_any_batch():
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(16, 2000)).astype(np.float32) * 2)
    all_params = [random_params(rng, 2000) for _ in range(16)]
    prompts = [[1, 2, 3]] * 16
    outputs = [[4] * row for row in range(16)]
    together = sample_all(logits, all_params, prompts, outputs).token_ids
    alone = [
        sample_all(
            logits[row : row + 1], [all_params[row]], [prompts[row]], [outputs[row]]
        ).token_ids[0]
        for row in range(16)
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63, 2**64 - 1])
def test_uniforms_are_the_published_splitmix64(seed):
    positions = np.array([0, 1, 2, 17, 255])
    got = uniforms(np.full(5, seed, np.uint64), positions)
    assert got.tolist() == [reference_uniform(seed, position) for position in positions.tolist()]


def test_uniforms_of_known_outputs():
    # The first outputs of SplitMix64 seeded with 1234567, as the reference code prints them.
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniforms(np.full(3, 1234567, np.uint64), np.arange(3))
    assert got.tolist() == [(output >> 11) / 2**53 for output in outputs]


@pytest.mark.parametrize("neighbours", ["positions of a seed", "seeds at a position"])
def test_draws_follow_the_distribution(neighbours):
    params = SamplingParams(seed=0, temperature=0.8, top_k=9, top_p=0.95)
    logits = np.random.default_rng(8).normal(size=12)
    expected = np.array(reference_probabilities(logits.tolist(), params))
    count = 20_000
    seeds, positions = np.full(count, 77, np.uint64), np.arange(count)
    if neighbours == "seeds at a position":
        seeds, positions = np.arange(count, dtype=np.uint64), np.full(count, 5)
    weights = torch.from_numpy(expected.astype(np.float32)).expand(count, -1)
    tokens = draw(weights, torch.from_numpy(uniforms(seeds, positions)))
    counts = np.bincount(tokens.numpy(), minlength=12)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - count * expected)[kept] ** 2 / (count * expected[kept])).sum()
    assert chi_square < 27.9  # the 99.9th percentile at 9 degrees of freedom; fewer here


def test_a_draw_never_takes_a_token_without_weight():
    weights = torch.zeros(4, 1000)
    weights[0, 999] = weights[1, 0] = weights[2, 511] = weights[3, 512] = 1e-30
    almost_one = torch.full((4,), 1 - 2.0**-53, dtype=torch.float64)
    assert draw(weights, almost_one).tolist() == [999, 0, 511, 512]
    assert draw(weights, torch.zeros(4, dtype=torch.float64)).tolist() == [999, 0, 511, 512]


def test_top_k_keeps_the_lower_ids_of_equal_tokens():
    logits = torch.zeros(2, 10)
    logits[1, 5:] = -1
    weights = logits.exp()
    ones, zeros = np.ones(2), np.zeros(2, np.float32)
    truncate(logits, weights, np.array([3, 7]), ones, zeros)
    assert weights.nonzero().tolist() == [[0, i] for i in range(3)] + [[1, i] for i in range(7)]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probabilities = torch.tensor([[0.125, 0.5, 0.25, 0.125]])
    logits = (probabilities / 0.5).log()
    for top_p, kept in [(0.5, [1]), (0.51, [1, 2]), (0.75, [1, 2]), (0.8, [0, 1, 2]), (1.0, 4)]:
        weights = logits.exp()
        truncate(logits, weights, np.array([4]), np.array([top_p]), np.zeros(1, np.float32))
        expected = kept if isinstance(kept, list) else list(range(kept))
        assert weights[0].nonzero().squeeze(1).tolist() == expected


def test_few_candidates_and_a_whole_sort_cut_alike():
    rng = np.random.default_rng(4)
    values = (np.round(rng.normal(size=(6, 5000)) * 64) / 64).astype(np.float32)
    logits = torch.from_numpy(values - values.max(1, keepdims=True))
    # The first rows find their boundary among the first candidates, the last ones do not.
    top_k = np.array([5, 900, 5000, 1025, 4000, 5000])
    top_p = np.array([1.0, 0.5, 0.05, 1.0, 0.99, 0.999])
    weights = logits.exp()
    truncate(logits, weights, top_k, top_p, np.zeros(6, np.float32))
    for row in range(6):
        params = SamplingParams(seed=0, top_k=int(top_k[row]), top_p=float(top_p[row]))
        expected = np.array(reference_probabilities(logits[row].tolist(), params))
        assert np.array_equal(weights[row].numpy() > 0, expected > 0)


def draw_by_kernel(self, logits, places, rows, positions, **_):
    return self._draw_by_kernel(logits, places, rows, positions)


def test_logits_of_16_bits_are_sampled_on_a_gpu_as_their_float32(monkeypatch):
    monkeypatch.setattr(Sampler, "_draw", draw_by_kernel)
    rng = np.random.default_rng(7)
    params = [random_params(rng, 60) for _ in range(30)]
    plain = [SamplingParams(seed=n, temperature=float(n % 2)) for n in range(9)]
    for all_params in (params, plain, plain[::2]):
        logits = torch.from_numpy(rng.normal(size=(len(all_params), 60))).to(torch.bfloat16)
        logits[3, 5] = torch.nan
        rows = logits, all_params, [[1]] * len(all_params), [[4, 4]] * len(all_params)
        expected = sample_all(logits.float(), *rows[1:])
        with monkeypatch.context() as gpu:
            gpu.setattr(Sampler, "_likeliest", lambda _, logits: ops.greedy(logits))
            actual = sample_all(*rows)
        assert actual.is_finite.tolist() == expected.is_finite.tolist()
        assert actual.token_ids.tolist() == expected.token_ids.tolist()


def test_penalties_count_the_tokens_that_are_sampled():
    params = SamplingParams(seed=1, temperature=0, frequency_penalty=2.0, presence_penalty=1.0)
    sampler = Sampler(2, 4, EOS, CPU)
    sampler.add(1, params, np.array([0], np.int32), 1)
    logits = torch.tensor([[6.0, 5.0, 0.0, 0.5]])
    got, output = [], []
    for step in range(8):
        sampled = sampler.sample(
            logits.clone(), np.array([1]), np.array([1 + step]), np.array([step])
        )
        got.append(int(sampled.token_ids[0]))
        expected = reference_token(logits[0].tolist(), params, [0], output, EOS)
        assert got[-1] == expected
        output.append(expected)
    assert len(set(got)) > 1


def test_a_row_does_not_inherit_the_counts_of_the_one_before():
    params = SamplingParams(seed=1, temperature=0, frequency_penalty=2.0)
    sampler = Sampler(3, 4, EOS, CPU)
    sampler.add(0, params, np.array([1, 0, 0, 0], np.int32), 1)
    sampler.release([0])
    sampler.add(2, params, np.array([1], np.int32), 1)
    logits = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    sampled = sampler.sample(logits, np.array([2]), np.array([1]), np.array([0]))
    assert sampled.token_ids.tolist() == [0]


def test_logprobs_are_those_of_the_model_before_anything_else():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(4, 50)).astype(np.float32)
    all_params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.2, top_k=3, logit_bias={9: 50.0}, logprobs=0),
        SamplingParams(seed=3, temperature=0, repetition_penalty=1.7, logprobs=4),
        SamplingParams(seed=4, temperature=3.0, logprobs=2),
    ]
    sampled = sample_all(torch.from_numpy(values), all_params, [[5, 6]] * 4, [[7]] * 4)
    assert [entry.index for entry in sampled.logprobs] == [1, 2, 3]
    assert sampled.token_ids[1] == 9
    for entry in sampled.logprobs:
        expected = reference_logprobs(values[entry.index])
        num_top = all_params[entry.index].logprobs
        best = np.argsort(-expected, kind="stable")[:num_top]
        assert entry.logprob == pytest.approx(expected[sampled.token_ids[entry.index]], abs=1e-5)
        assert entry.top_token_ids.tolist() == best.tolist()
        assert entry.top_logprobs == pytest.approx(expected[best], abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_a_logit_that_is_not_finite_is_marked(bad):
    logits = torch.zeros(3, 600)
    logits[:, 3] = 5.0
    logits[1, 599] = bad
    for params in [
        SamplingParams(seed=1, temperature=0),
        SamplingParams(seed=1, temperature=0.01, top_p=0.9),
    ]:
        sampled = sample_all(logits, [params] * 3, [[1]] * 3, [[]] * 3)
        assert sampled.is_finite.tolist() == [True, False, True]
        assert sampled.token_ids[[0, 2]].tolist() == [3, 3]
        assert 0 <= sampled.token_ids[1] < 600


def test_end_tokens_are_eos_and_stop_tokens():
    sampler = Sampler(3, 50, EOS, CPU)
    prompt = np.array([1], np.int32)
    sampler.add(0, SamplingParams(seed=0), prompt, 1)
    sampler.add(1, SamplingParams(seed=0, ignore_eos=True, stop_token_ids=(9,)), prompt, 1)
    sampler.add(2, SamplingParams(seed=0, stop_token_ids=(9, 10)), prompt, 1)
    ends = {
        row: [
            token
            for token in range(50)
            if sampler.table.ends(np.array([row]), np.array([token]))[0]
        ]
        for row in range(3)
    }
    assert ends == {0: [2, 7], 1: [9], 2: [2, 7, 9, 10]}


@pytest.mark.parametrize("temperature", [1e-38, 1e-5, 100.0])
def test_extreme_temperatures_stay_in_range(temperature):
    logits = torch.tensor([[3e4, -3e4, 2.9e4, 0.0]])
    params = SamplingParams(seed=3, temperature=temperature)
    token = sample_all(logits, [params], [[1]], [[]]).token_ids[0]
    assert token == 0 if temperature < 1 else 0 <= token < 4


def test_all_tokens_suppressed_still_gives_a_token():
    params = SamplingParams(seed=1, min_tokens=5, stop_token_ids=tuple(range(8)))
    token = sample_all(torch.zeros(1, 8), [params], [[1]], [[]]).token_ids[0]
    assert 0 <= token < 8
