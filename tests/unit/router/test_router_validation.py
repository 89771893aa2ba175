"""Every limit of the public contract, with its error message."""

import math
from dataclasses import replace

import pytest

from contract.errors import InvalidArgumentError
from contract.request import GenerateRequest, Model
from contract.sampling import BeamSearch, SamplingParams, StructuredOutput
from router.request.validation import check_request, complete_sampling

MODEL = Model("tiny", max_model_len=64, vocab_size=500, eos_token_ids=(1,))
MAX_PROMPT_BYTES = 1000


def check(prompt="hello", **kwargs):
    check_request(GenerateRequest(prompt=prompt, **kwargs), MODEL, MAX_PROMPT_BYTES)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temperature", math.nan, "is nan; it must be in [0, 100]"),
        ("temperature", math.inf, "is inf; it must be in [0, 100]"),
        ("temperature", -0.1, "is -0.1; it must be in [0, 100]"),
        ("temperature", 100.5, "is 100.5; it must be in [0, 100]"),
        ("top_k", -1, "is -1; it must be in [0, 500]"),
        ("top_k", 501, "is 501; it must be in [0, 500]"),
        ("top_p", 2.0, "is 2.0; it must be in (0, 1]"),
        ("top_p", 0.0, "is 0.0; it must be in (0, 1]"),
        ("top_p", math.nan, "is nan; it must be in (0, 1]"),
        ("min_p", 1.1, "is 1.1; it must be in [0, 1]"),
        ("min_p", math.nan, "is nan; it must be in [0, 1]"),
        ("repetition_penalty", 0.0, "is 0.0; it must be in (0, 100]"),
        ("repetition_penalty", math.inf, "is inf; it must be in (0, 100]"),
        ("presence_penalty", -2.1, "is -2.1; it must be in [-2, 2]"),
        ("frequency_penalty", 2.1, "is 2.1; it must be in [-2, 2]"),
        ("frequency_penalty", math.nan, "is nan; it must be in [-2, 2]"),
        ("seed", -1, f"is -1; it must be in [0, {2**64 - 1}]"),
        ("seed", 2**64, f"is {2**64}; it must be in [0, {2**64 - 1}]"),
        ("max_tokens", 0, "is 0; it must be in [1, 64]"),
        ("max_tokens", -5, "is -5; it must be in [1, 64]"),
        ("max_tokens", 10**30, f"is {10**30}; it must be in [1, 64]"),
        ("min_tokens", -1, "is -1; it must be in [0, 64]"),
        ("logprobs", 500, "is 500; it must be in [0, 20]"),
        ("logprobs", -1, "is -1; it must be in [0, 20]"),
        ("allowed_token_ids", (1,) * 1025, "has 1025 entries; it must have at most 1024"),
        ("stop_token_ids", (1,) * 65, "has 65 entries; it must have at most 64"),
        (
            "logit_bias",
            dict.fromkeys(range(1025), 0.0),
            "has 1025 entries; it must have at most 1024",
        ),
        ("logit_bias", {500: 1.0}, "has the token id 500; it must be in [0, 500)"),
    ],
)
def test_a_sampling_field_outside_its_range_is_refused(name, value, problem):
    with pytest.raises(InvalidArgumentError) as caught:
        check(sampling=SamplingParams(**{name: value}))
    assert str(caught.value) == f"sampling.{name} {problem}"
    assert caught.value.field == f"sampling.{name}"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"prompt": ""}, "prompt is empty; it must have at least 1 character"),
        ({"prompt": ()}, "prompt is empty; it must have at least 1 token"),
        (
            {"prompt": (1,) * 64},
            "prompt has 64 tokens; it must have at most 63, one less than the model's context",
        ),
        ({"prompt": (3, 500)}, "prompt[1] is 500; it must be in [0, 500)"),
        ({"prompt": (-1,)}, "prompt[0] is -1; it must be in [0, 500)"),
        ({"prompt": (2**70,)}, f"prompt[0] is {2**70}; it must be in [0, 500)"),
        (
            {"prompt": "x" * 1001},
            "prompt has 1001 bytes; at most 1000 can fit the model's context of 64 tokens",
        ),
        (
            {"prompt": "a\ud800"},
            "prompt has U+D800 at 1, half of a surrogate pair; it must be valid Unicode",
        ),
        ({"n": 0}, "n is 0; it must be in [1, 64]"),
        ({"n": 65}, "n is 65; it must be in [1, 64]"),
        ({"stop": ("x",) * 10_000}, "stop has 10000 entries; it must have at most 16"),
        ({"stop": ("x", "")}, "stop[1] has 0 characters; it must have 1 to 1024"),
        ({"stop": ("x" * 2**20,)}, "stop[0] has 1048576 characters; it must have 1 to 1024"),
        (
            {"stop": ("\udc00",)},
            "stop[0] has U+DC00 at 0, half of a surrogate pair; it must be valid Unicode",
        ),
        ({"request_id": "x" * 129}, "request_id has 129 characters; it must have at most 128"),
        (
            {"request_id": "a\nb"},
            "request_id is 'a\\nb'; it must have printable characters only",
        ),
        ({"cache_pin_s": 0.0}, "cache_pin_s is 0.0; it must be in (0, 86400]"),
        ({"cache_pin_s": 86401.0}, "cache_pin_s is 86401.0; it must be in (0, 86400]"),
        ({"cache_pin_s": math.nan}, "cache_pin_s is nan; it must be in (0, 86400]"),
        ({"cache_salt": "x" * 129}, "cache_salt has 129 characters; it must have at most 128"),
        (
            {"sampling": SamplingParams(logit_bias={3: math.nan})},
            "sampling.logit_bias[3] is nan; it must be in [-100, 100]",
        ),
        (
            {"sampling": SamplingParams(stop_token_ids=(7, 999))},
            "sampling.stop_token_ids[1] is 999; it must be in [0, 500)",
        ),
        (
            {"sampling": SamplingParams(min_tokens=6, max_tokens=5)},
            "sampling.min_tokens is 6; it must be in [0, 5]",
        ),
    ],
)
def test_a_bad_request_is_refused_naming_field_value_and_limit(kwargs, message):
    with pytest.raises(InvalidArgumentError) as caught:
        check(**kwargs)
    assert str(caught.value) == message


def test_every_limit_itself_is_accepted():
    check(
        prompt="x" * 1000,
        n=64,
        stop=("x" * 1024,) * 16,
        cache_salt="x" * 128,
        cache_pin_s=86400,
        request_id="x" * 128,
        sampling=SamplingParams(
            temperature=100,
            top_k=500,
            top_p=1,
            min_p=1,
            repetition_penalty=100,
            presence_penalty=-2,
            frequency_penalty=2,
            seed=2**64 - 1,
            logit_bias=dict.fromkeys(range(500), -100.0),
            max_tokens=64,
            min_tokens=64,
            stop_token_ids=(499,) * 64,
            logprobs=20,
        ),
    )
    check(prompt=(499,) * 63)


def test_unset_seed_and_max_tokens_are_settled():
    settled = complete_sampling(SamplingParams(), 10, MODEL, seed=42)
    assert (settled.seed, settled.max_tokens) == (42, 54)
    kept = complete_sampling(SamplingParams(seed=0, max_tokens=3), 10, MODEL, seed=42)
    assert (kept.seed, kept.max_tokens) == (0, 3)


def test_max_tokens_may_be_cut_to_the_contexts_room():
    for max_tokens, settled in ((3, 3), (54, 54), (64, 54)):
        sampling = complete_sampling(
            SamplingParams(max_tokens=max_tokens), 10, MODEL, seed=1, cuts_max_tokens=True
        )
        assert sampling.max_tokens == settled


@pytest.mark.parametrize(
    ("num_prompt_tokens", "sampling", "message"),
    [
        (
            10,
            SamplingParams(max_tokens=55),
            (
                "sampling.max_tokens is 55; it must be at most 54, since the model's context"
                " has 64 tokens and the prompt 10"
            ),
        ),
        (
            64,
            SamplingParams(max_tokens=1),
            "prompt has 64 tokens; it must have at most 63, one less than the model's context",
        ),
        (0, SamplingParams(), "prompt is empty; it must have at least 1 token"),
        (60, SamplingParams(min_tokens=5), "sampling.min_tokens is 5; it must be in [0, 4]"),
    ],
)
def test_what_does_not_fit_the_context_with_the_prompt_is_refused(
    num_prompt_tokens, sampling, message
):
    with pytest.raises(InvalidArgumentError) as caught:
        complete_sampling(sampling, num_prompt_tokens, MODEL, seed=1)
    assert str(caught.value) == message


STRUCTURED = replace(MODEL, structured_output=True)
FORM = SamplingParams(structured=StructuredOutput(json_object=True))


@pytest.mark.parametrize(
    ("request_", "field", "problem"),
    [
        ({"bad_words": ("x",), "sampling": FORM}, "bad_words", "with structured it must be unset"),
        ({"bad_words": ("x",), "beam": BeamSearch(2)}, "bad_words", "with beam it must be unset"),
        (
            {"bad_words": ("x",), "sampling": SamplingParams(ignore_eos=True)},
            "sampling.ignore_eos",
            "is true",
        ),
        (
            {"sampling": replace(FORM, allowed_token_ids=(1,))},
            "sampling.allowed_token_ids",
            "with structured it must be unset",
        ),
        (
            {"sampling": SamplingParams(min_tokens=1, allowed_token_ids=(1,))},
            "sampling.allowed_token_ids",
            "with min_tokens it must not be",
        ),
        ({"truncate_prompt_tokens": 64}, "truncate_prompt_tokens", "is 64; it must be in [1, 63]"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0"),
        ({"stream_interval": 0}, "stream_interval", "is 0; it must be in [1, 1024]"),
        ({"stream_interval": 1025}, "stream_interval", "is 1025; it must be in [1, 1024]"),
    ],
)
def test_what_does_not_go_together_is_refused(request_, field, problem):
    with pytest.raises(InvalidArgumentError) as caught:
        check_request(GenerateRequest("hello", **request_), STRUCTURED, MAX_PROMPT_BYTES)
    assert caught.value.field == field
    assert problem in str(caught.value)


def test_a_prompt_that_is_cut_may_be_longer_than_the_context():
    for prompt in ("x" * 2000, (1,) * 100):
        with pytest.raises(InvalidArgumentError):
            check(prompt)
        check(prompt, truncate_prompt_tokens=-1)
