"""Quotas: when usage is counted and returned, and when to retry."""

import pytest

from contract.errors import InvalidArgumentError, TooBusyError
from router.access.quotas import Quota, Quotas, TokenBucket


def quotas(**limits):
    return Quotas({"a": Quota(**limits)}, now=0.0)


def test_bucket_is_full_at_first_and_refills_in_a_minute():
    bucket = TokenBucket(60, now=100.0)
    bucket.take(60, 100.0)
    assert bucket.wait_s(1, 100.0) == pytest.approx(1.0)
    assert bucket.wait_s(30, 115.0) == pytest.approx(15.0)
    assert bucket.wait_s(60, 160.0) == 0
    bucket.take(60, 1000.0)
    assert bucket.wait_s(1, 1000.0) == pytest.approx(1.0), "it holds no more than a minute's"


def test_more_than_a_minutes_begins_with_a_full_bucket_and_is_paid_off():
    bucket = TokenBucket(60, now=0.0)
    assert bucket.wait_s(90, 0.0) == 0
    bucket.take(90, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(31.0)
    assert bucket.wait_s(90, 0.0) == pytest.approx(90.0)


def test_requests_per_minute_say_when_to_come_again():
    quota = quotas(requests_per_minute=2)
    for _ in range(2):
        quota.begin("a", 0.0).end(0)
    with pytest.raises(TooBusyError, match=r"'a' .* requests_per_minute, 2") as caught:
        quota.begin("a", 10.0)
    assert caught.value.retry_after_s == pytest.approx(20.0)
    quota.begin("a", 30.0)
    with pytest.raises(TooBusyError):
        quota.begin("a", 30.0)


def test_a_refused_request_is_not_counted():
    quota = quotas(max_concurrent_requests=1, requests_per_minute=2)
    share = quota.begin("a", 0.0)
    for _ in range(5):
        with pytest.raises(TooBusyError, match="max_concurrent_requests is 1"):
            quota.begin("a", 0.0)
    share.end(0)
    quota.begin("a", 0.0)


def test_tokens_that_were_not_produced_are_given_back():
    quota = quotas(tokens_per_minute=600)
    share = quota.begin("a", 0.0)
    share.reserve(600, 0.0)
    other = quota.begin("a", 0.0)
    with pytest.raises(TooBusyError, match="tokens_per_minute, 600") as caught:
        other.reserve(100, 0.0)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    share.end(500)
    other.reserve(100, 0.0)
    with pytest.raises(TooBusyError):
        quota.begin("a", 0.0).reserve(1, 0.0)


def test_tokens_in_flight_are_bounded_and_come_back():
    quota = quotas(max_tokens_in_flight=100)
    first, second = quota.begin("a", 0.0), quota.begin("a", 0.0)
    first.reserve(60, 0.0)
    with pytest.raises(TooBusyError, match="60 tokens in flight; with 41 more"):
        second.reserve(41, 0.0)
    first.end(10)
    second.reserve(100, 0.0)


def test_a_request_that_was_left_is_in_flight_until_it_must_have_ended():
    quota = quotas(max_tokens_in_flight=100)
    left = quota.begin("a", 0.0)
    left.reserve(60, 0.0)
    left.leave("r", 0.0, until=30.0)
    with pytest.raises(TooBusyError, match="60 tokens in flight"):
        quota.begin("a", 29.0).reserve(41, 29.0)
    quota.begin("a", 30.0).reserve(100, 30.0)


def test_a_request_that_is_resumed_is_in_flight_once_until_it_ends():
    quota = quotas(max_tokens_in_flight=100)
    left = quota.begin("a", 0.0)
    left.reserve(60, 0.0)
    left.leave("r", 0.0, until=30.0)
    again = quota.begin("a", 1.0)
    again.take_up("r", 60)
    with pytest.raises(TooBusyError, match="60 tokens in flight"):
        quota.begin("a", 31.0).reserve(41, 31.0)  # it is live, so no period is over
    again.end(20)
    quota.begin("a", 31.0).reserve(100, 31.0)


def test_a_request_that_is_resumed_was_charged_when_it_began():
    quota = quotas(tokens_per_minute=600)
    left = quota.begin("a", 0.0)
    left.reserve(600, 0.0)
    left.leave("r", 0.0, until=30.0)
    again = quota.begin("a", 0.0)
    again.take_up("r", 600)
    again.end(100)
    with pytest.raises(TooBusyError, match="tokens_per_minute"):
        quota.begin("a", 0.0).reserve(1, 0.0)


def test_request_that_never_fits_is_the_callers_fault():
    with pytest.raises(InvalidArgumentError, match=r"max_tokens makes .* 101 .* is 100"):
        quotas(max_tokens_in_flight=100).begin("a", 0.0).reserve(101, 0.0)


def test_refused_requests_leave_nothing_behind():
    quota = quotas(max_tokens_in_flight=100, tokens_per_minute=100, max_concurrent_requests=2)
    for _ in range(10):
        share = quota.begin("a", 0.0)
        with pytest.raises(InvalidArgumentError):
            share.reserve(101, 0.0)
        share.end(0)
    quota.begin("a", 0.0).reserve(100, 0.0)


def test_tenants_do_not_share_and_one_without_a_quota_is_free():
    quota = Quotas(
        {"a": Quota(max_concurrent_requests=1), "b": Quota(max_concurrent_requests=1)}, 0.0
    )
    quota.begin("a", 0.0)
    quota.begin("b", 0.0)
    for _ in range(100):
        quota.begin("c", 0.0).reserve(10**9, 0.0)


def test_a_check_counts_nothing_and_refuses_what_could_not_begin():
    quotas = Quotas({"a": Quota(requests_per_minute=1, tokens_per_minute=60)}, now=0)
    quotas.check("a", 60, now=0)
    quotas.check("other", 10**9, now=0)
    share = quotas.begin("a", now=0)
    with pytest.raises(TooBusyError, match="requests_per_minute, 1"):
        quotas.check("a", 1, now=0)
    share.reserve(50, now=60)
    quotas.check("a", 10, now=60)
    with pytest.raises(TooBusyError, match="does not have 11 tokens left of its tokens_per_minute"):
        quotas.check("a", 11, now=60)
