"""A naive reference of sampling: one row at a time, full sorts, no shared code."""

import math

import numpy as np

from contract.sampling import SamplingParams

_MASK = 2**64 - 1


def reference_uniform(seed, position):
    state = seed
    for _ in range(position + 1):  # SplitMix64 as published: a generator, stepped
        state = (state + 0x9E3779B97F4A7C15) & _MASK
    x = state
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((x ^ (x >> 31)) >> 11) / 2**53


def reference_logits(logits, params: SamplingParams, prompt, output, eos_token_ids):
    """The logits of one row after penalties, bias and suppression, as a list of floats."""
    result = [float(value) for value in logits]
    for token in set(prompt) | set(output):
        value = result[token]
        penalty = params.repetition_penalty
        result[token] = value / penalty if value > 0 else value * penalty
    for token in set(output):
        result[token] -= params.presence_penalty
        result[token] -= params.frequency_penalty * list(output).count(token)
    for token, bias in params.logit_bias.items():
        result[token] += bias
    if len(output) < params.min_tokens:
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= set(eos_token_ids)
        for token in ends:
            result[token] = -math.inf
    return result


def reference_probabilities(logits, params: SamplingParams):
    """The distribution that is drawn from, as a list of floats in token order."""
    best = max(logits)
    # float32 where the sampler is: two logits that it cannot tell apart are a tie.
    scaled = [
        float(np.float32(np.float32(value - best) / np.float32(params.temperature)))
        for value in logits
    ]
    weights = [math.exp(value) for value in scaled]
    order = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        total = sum(weights[token] for token in order)
        kept, mass = [], 0.0
        for token in order:
            kept.append(token)
            mass += weights[token]
            if mass >= params.top_p * total:
                break
        order = kept
    kept = {token for token in order if weights[token] >= params.min_p}
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def reference_token(logits, params: SamplingParams, prompt, output, eos_token_ids):
    processed = reference_logits(logits, params, prompt, output, eos_token_ids)
    if params.temperature == 0:
        return max(range(len(processed)), key=lambda token: (processed[token], -token))
    target = reference_uniform(params.seed, len(prompt) + len(output))
    running = 0.0
    for token, probability in enumerate(reference_probabilities(processed, params)):
        running += probability
        if running > target:
            return token
    raise AssertionError("the probabilities do not sum to 1")


def reference_logprobs(logits):
    values = np.asarray(logits, np.float64)
    shifted = values - values.max()
    return shifted - math.log(np.exp(shifted).sum())
