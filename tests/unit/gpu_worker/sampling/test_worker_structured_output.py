"""Rows that keep to a grammar, beside rows that do not."""

from pathlib import Path

import llguidance
import numpy as np
import pytest
import torch

import contract.sampling
from contract.sampling import SamplingParams
from gpu_worker.sampling.grammar_masks import RowGrammars
from gpu_worker.sampling.sampler import Sampler

TOKENIZER = Path(__file__).parents[4] / "models" / "quire-tiny-python" / "tokenizer.json"
VOCAB = 4096
EOS = 1
CPU = torch.device("cpu")
DIGITS = "start: /[0-9]{3}/"
SENTENCE = "start: /([a-z]{1,8} ){30,60}/"


@pytest.fixture(params=[False, True], ids=["at need", "beside"])
def structured(request):
    made = RowGrammars(TOKENIZER, VOCAB, [EOS], CPU, is_beside=request.param)
    yield made
    made.close()


@pytest.fixture
def sampler(structured):
    return Sampler(4, VOCAB, (EOS,), CPU, structured)


def ints(*values):
    return np.array(values, np.int64)


def form(grammar):
    return None if grammar is None else contract.sampling.StructuredOutput(grammar=grammar)


def add(sampler, row, grammar=None, known=(), **params):
    params = SamplingParams(seed=row, temperature=0.0, structured=form(grammar), **params)
    sampler.add(row, params, np.array([7, *known], np.int32), 1)


def sample(sampler, rows, logits):
    """The tokens of one step, whose values the grammars follow."""
    rows = ints(*rows)
    sampled = sampler.sample(logits.clone(), rows, ints(*[9] * len(rows)), ints(*[0] * len(rows)))
    token_ids = sampled.token_ids.numpy()
    sampler.follow(rows, lambda: token_ids)
    return token_ids.tolist(), sampled.stuck.tolist()


def test_a_row_draws_the_likeliest_of_what_its_grammar_admits_until_it_may_only_end(sampler):
    tokenizer = llguidance.LLTokenizer(TOKENIZER.read_text(), n_vocab=VOCAB, eos_token=[EOS])
    reference = llguidance.LLMatcher(tokenizer, DIGITS)
    add(sampler, 0, DIGITS)
    generator = torch.Generator().manual_seed(0)
    output = []
    while EOS not in output:
        logits = torch.randn(1, VOCAB, generator=generator)
        admitted = np.frombuffer(reference.compute_logit_bias(), np.uint8) > 0
        expected = int(np.where(admitted, logits[0].numpy(), -np.inf).argmax())
        ((token,), _) = sample(sampler, [0], logits)
        assert token == expected
        reference.consume_token(token)
        output.append(token)
    text = tokenizer.decode_str(output[:-1])
    assert len(text) == 3
    assert text.isdigit()


def test_rows_without_a_grammar_are_left_as_they_are(sampler):
    add(sampler, 0)
    add(sampler, 1, DIGITS)
    add(sampler, 2)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    (first, second, third), stuck = sample(sampler, [0, 1, 2], logits)
    assert [first, third] == logits.argmax(1)[[0, 2]].tolist()
    assert second != logits.argmax(1)[1]
    assert stuck == []


def test_a_resumed_row_goes_on_after_the_output_it_has(sampler):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    add(sampler, 0, DIGITS)
    output = []
    while EOS not in output:
        output += sample(sampler, [0], logits)[0]
    for length in range(len(output)):
        sampler.release([0])
        add(sampler, 0, DIGITS, known=output[:length])
        assert sample(sampler, [0], logits)[0] == [output[length]]


def test_a_row_that_is_used_again_has_the_new_grammar_or_none(sampler):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    add(sampler, 0, DIGITS)
    sample(sampler, [0], logits)
    sampler.release([0])
    add(sampler, 0)
    assert sample(sampler, [0], logits)[0] == logits.argmax(1).tolist()
    sampler.release([0])
    add(sampler, 0, 'start: "x"')
    (token,), _ = sample(sampler, [0], logits)
    assert token == llguidance.LLTokenizer(TOKENIZER.read_text()).tokenize_str("x")[0]


def test_a_row_whose_grammar_cannot_be_followed_is_stuck_alone(sampler):
    add(sampler, 0, DIGITS, known=[EOS, EOS])  # no digits
    add(sampler, 1, DIGITS)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    assert sample(sampler, [0, 1], logits)[1] == [0]


def test_rows_that_come_go_and_pause_keep_their_places_in_their_grammars(sampler):
    tokenizer = llguidance.LLTokenizer(TOKENIZER.read_text(), n_vocab=VOCAB, eos_token=[EOS])
    references = {}
    generator = torch.Generator().manual_seed(5)
    for step, rows in enumerate([[0, 1], [1], [0, 1], [1, 0], [0], [2, 0, 1], [0, 2], [1, 2], [0]]):
        if step == 4:
            sampler.release([1])
            references.pop(1)
        for row in rows:
            if row not in references:
                add(sampler, row, SENTENCE)
                references[row] = llguidance.LLMatcher(tokenizer, SENTENCE)
        logits = torch.randn(len(rows), VOCAB, generator=generator)
        tokens, _ = sample(sampler, rows, logits)
        for row, token, of_row in zip(rows, tokens, logits.numpy(), strict=True):
            admitted = np.frombuffer(references[row].compute_logit_bias(), np.uint8) > 0
            assert token == np.where(admitted, of_row, -np.inf).argmax()
            references[row].consume_token(token)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_draws_among_suppressed_tokens_are_those_of_the_plain_exponential(
    sampler, monkeypatch, temperature
):
    generator = torch.Generator().manual_seed(6)
    rows, positions, outputs = ints(0, 1, 2), ints(9, 9, 9), ints(0, 0, 0)
    for _ in range(30):
        for row, grammar in enumerate([SENTENCE, None, 'start: "x" | /[a-z]*/']):
            params = SamplingParams(
                seed=row, temperature=temperature, structured=form(grammar), top_p=0.9
            )
            sampler.add(row, params, np.array([7], np.int32), 1)
        logits = torch.randn(3, VOCAB, generator=generator) * 20  # some far below the likeliest
        drawn = sampler.sample(logits.clone(), rows, positions, outputs).token_ids
        with monkeypatch.context() as patched:
            patched.setattr("gpu_worker.sampling.sampler._exp_of_many_least", torch.exp)
            plain = sampler.sample(logits.clone(), rows, positions, outputs).token_ids
        assert torch.equal(drawn, plain)
        sampler.release([0, 1, 2])


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ValueError):  # noqa: PT011  the library's words
        RowGrammars(path, VOCAB, [EOS], CPU, is_beside=False)


@pytest.mark.parametrize("num_known", [0, 2, 5])
def test_a_budget_of_tokens_forces_the_end_marker_and_changes_nothing_else(sampler, num_known):
    """As the router bounds thinking; also in a row that comes back with a part of its output."""
    end, budget, num_tokens = 300, 5, 12
    grammar = f"start: <[^{end}]>{{0,{budget}}} <[{end}]> <[*]>*"
    drawn = torch.randn(num_tokens, VOCAB, generator=torch.Generator().manual_seed(4))
    drawn[:, end] = -9.0
    free = drawn.argmax(1).tolist()
    expected = [*free[:budget], end, *free[budget + 1 :]]
    add(sampler, 0, grammar, known=expected[:num_known])
    found = [sample(sampler, [0], drawn[i : i + 1])[0][0] for i in range(num_known, num_tokens)]
    assert found == expected[num_known:]
