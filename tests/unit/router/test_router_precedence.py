"""Priority and tenant in metadata, and their checks."""

import pytest

from contract.errors import InvalidArgumentError
from contract.request import GenerateRequest, Model
from router.access.tenancy import with_precedence
from router.request.validation import check_request

MODEL = Model("m", max_model_len=64, vocab_size=100, eos_token_ids=())
REQUEST = GenerateRequest(prompt="a")


def test_what_is_not_said_stays_as_it_is():
    assert with_precedence(REQUEST, {"traceparent": "x"}) is REQUEST


@pytest.mark.parametrize("text", ["7", "+7", "-100", "0"])
def test_a_priority_is_an_integer(text):
    request = with_precedence(REQUEST, {"x-quire-priority": text, "x-quire-tenant": "a b"})
    assert (request.priority, request.tenant) == (int(text), "a b")


@pytest.mark.parametrize("text", ["", "high", "1.5", "1_0", " 1", "--1", "\u0663", "9" * 5000])
def test_a_value_that_is_no_integer_is_refused(text):
    with pytest.raises(InvalidArgumentError, match=r"^x-quire-priority is .*must be an integer"):
        with_precedence(REQUEST, {"x-quire-priority": text})


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"x-quire-priority": "101"}, r"priority is 101; it must be in \[-100, 100\]"),
        ({"x-quire-priority": "-101"}, "priority is -101"),
        ({"x-quire-tenant": "a" * 129}, "tenant has 129 characters; it must have at most 128"),
        ({"x-quire-tenant": "a\n"}, "tenant is .* printable ASCII"),
        ({"x-quire-tenant": "\u00e9"}, "tenant is .* printable ASCII"),
    ],
)
def test_limits_are_named(metadata, problem):
    with pytest.raises(InvalidArgumentError, match=problem):
        check_request(with_precedence(REQUEST, metadata), MODEL, 1000)
