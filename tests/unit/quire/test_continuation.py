"""How a client continues a broken stream: its next request, and the events that it returns."""

import pytest

from contract.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    QuireError,
    TooBusyError,
    UnavailableError,
)
from quire.client.continuation import Continuation
from quire.client.retry import Retry, RetryBudget
from quire.client.types import (
    FinishReason,
    OutputDelta,
    OutputFinished,
    PromptScores,
    TokenLogprob,
    Usage,
)
from quire.v1 import inference_pb2

LOST = UnavailableError("connection reset")
END = OutputFinished(0, FinishReason.LENGTH)
USAGE = Usage(1, 2, 0)


def make(*, resumable=True, policy=None, budget=None, **fields):
    request = inference_pb2.GenerateRequest(text="x", resumable=resumable, **fields)
    continuation = Continuation(request, policy, budget or RetryBudget())
    continuation.next_request()
    return continuation


def delta(offset, token_ids, text="", index=0):
    return OutputDelta(index, offset, tuple(token_ids), text, ())


def test_a_resumable_request_has_an_id_and_a_seed_so_that_it_can_be_sent_again():
    continuation = make()
    request = continuation.next_request()
    assert request.request_id == continuation.request_id != ""
    assert request.sampling.HasField("seed")
    given = make(request_id="mine", sampling={"seed": 0}).next_request()
    assert (given.request_id, given.sampling.seed) == ("mine", 0)
    plain = make(resumable=False).next_request()
    assert not plain.request_id
    assert not plain.sampling.HasField("seed")


def test_a_stream_that_broke_is_resumed_behind_what_came():
    continuation = make(request_id="r")
    for event in (PromptScores(()), delta(0, [1, 2], "é"), delta(0, [9], "x", index=1)):
        assert continuation.receive(event) == event
    continuation.receive(OutputFinished(1, FinishReason.STOP))
    assert 0 < continuation.failed(LOST, 0.0) <= 0.05
    assert continuation.next_request() == inference_pb2.ResumeRequest(
        request_id="r",
        received=[
            inference_pb2.OutputReceived(output_index=0, num_tokens=2, num_text_bytes=2),
            inference_pb2.OutputReceived(
                output_index=1, num_tokens=1, num_text_bytes=1, finished=True
            ),
        ],
        has_prompt_scores=True,
    )
    assert continuation.receive(delta(2, [3])) == delta(2, [3])
    assert continuation.receive(END) is END
    assert not continuation.is_complete
    assert continuation.receive(USAGE) is USAGE
    assert continuation.is_complete


def test_the_parts_of_a_prompts_scores_become_one_event_though_the_stream_breaks_between_them():
    first, second = TokenLogprob(-1.0, ()), TokenLogprob(-2.0, ())
    continuation = make()
    assert continuation.receive(PromptScores((first,), has_more=True)) is None
    continuation.failed(LOST, 0.0)
    assert not continuation.next_request().has_prompt_scores
    assert continuation.receive(PromptScores((first,), has_more=True)) is None
    assert continuation.receive(PromptScores((second,))) == PromptScores((first, second))
    continuation.failed(LOST, 0.1)
    assert continuation.next_request().has_prompt_scores


@pytest.mark.parametrize("error", [NotFoundError("gone"), FailedPreconditionError("logprobs lost")])
def test_a_request_that_cannot_be_resumed_is_sent_again_and_what_came_before_is_skipped(error):
    continuation = make()
    continuation.receive(PromptScores(()))
    continuation.receive(delta(0, [1, 2, 3], "abc"))
    continuation.failed(LOST, 0.0)
    continuation.next_request()
    continuation.failed(error, 0.1)
    assert isinstance(continuation.next_request(), inference_pb2.GenerateRequest)
    assert continuation.receive(PromptScores(())) is None
    assert continuation.receive(delta(0, [1, 2], "a")) is None
    assert continuation.receive(delta(2, [3, 4], "bcd")) == delta(3, [4], "d")
    assert continuation.receive(delta(4, [5], "e")) == delta(4, [5], "e")


def test_one_that_breaks_while_it_repeats_is_resumed_behind_what_it_has_repeated():
    continuation = make(request_id="r")
    continuation.receive(delta(0, [1, 2, 3], "aéc"))
    continuation.receive(delta(0, [9], "x", index=1))
    continuation.receive(OutputFinished(1, FinishReason.STOP))
    for error in (LOST, NotFoundError("gone")):
        continuation.failed(error, 0.0)
        continuation.next_request()
    assert continuation.receive(delta(0, [1, 2], "aé")) is None
    continuation.failed(LOST, 0.1)
    assert continuation.next_request() == inference_pb2.ResumeRequest(
        request_id="r",
        received=[
            inference_pb2.OutputReceived(output_index=0, num_tokens=2, num_text_bytes=3),
            inference_pb2.OutputReceived(output_index=1),
        ],
    )
    assert continuation.receive(delta(2, [3, 4], "cd")) == delta(3, [4], "d")
    assert continuation.receive(delta(0, [9], "x", index=1)) is None
    assert continuation.receive(OutputFinished(1, FinishReason.STOP)) is None


@pytest.mark.parametrize("other", [delta(0, [1, 7], "ab"), delta(0, [1, 2], "ax")])
def test_a_different_output_the_second_time_is_an_error(other):
    continuation = make()
    continuation.receive(delta(0, [1, 2, 3], "abc"))
    for error in (LOST, NotFoundError("gone")):
        continuation.failed(error, 0.0)
        continuation.next_request()
    with pytest.raises(QuireError, match="differs from the tokens received before"):
        continuation.receive(other)


def test_a_gap_is_an_error():
    continuation = make()
    continuation.receive(delta(0, [1]))
    with pytest.raises(QuireError, match="continues at token 2; it should continue at 1"):
        continuation.receive(delta(2, [1]))


def test_it_gives_up_when_nothing_has_come_for_long_enough():
    continuation = make(policy=Retry(resume_within_s=5))
    continuation.receive(delta(0, [1]))
    continuation.failed(LOST, 100.0)
    continuation.failed(LOST, 104.0)
    with pytest.raises(UnavailableError):
        continuation.failed(LOST, 105.0)
    continuation.receive(delta(1, [1]))
    continuation.failed(LOST, 200.0)


def test_a_call_lost_before_its_first_event_is_resumed_as_long_as_others():
    budget = RetryBudget(capacity=2)
    continuation = make(policy=Retry(resume_within_s=5, max_attempts=2), budget=budget)
    continuation.failed(LOST, 100.0, took_s=3.0)
    for error in (NotFoundError("gone"), LOST, LOST):
        continuation.failed(error, 104.0)
    with pytest.raises(UnavailableError):
        continuation.failed(LOST, 105.0)
    refused = make(policy=Retry(max_attempts=2))
    refused.failed(LOST, 100.0, took_s=0.1)
    with pytest.raises(UnavailableError):
        refused.failed(LOST, 100.2, took_s=0.1)


def test_a_call_that_was_refused_is_sent_again_not_resumed():
    continuation = make()
    continuation.failed(LOST, 0.0, took_s=0.1)
    assert isinstance(continuation.next_request(), inference_pb2.GenerateRequest)


def test_the_service_says_when_to_retry():
    continuation = make()
    assert continuation.failed(TooBusyError("full", retry_after_s=7.5), 0.0) == 7.5


def test_the_id_of_a_call_that_has_not_been_seen_to_end_is_resumed():
    continuation = make()
    continuation.receive(delta(0, [1]))
    for error in (LOST, NotFoundError("gone"), AlreadyExistsError("is live")):
        continuation.failed(error, 0.0)
    assert isinstance(continuation.next_request(), inference_pb2.ResumeRequest)
    with pytest.raises(AlreadyExistsError):
        make().failed(AlreadyExistsError("is another's"), 0.0)


def test_a_repeated_call_that_the_router_of_an_earlier_one_displaces_is_resumed():
    continuation = make()
    continuation.receive(delta(0, [1]))
    for error in (LOST, NotFoundError("gone")):
        continuation.failed(error, 0.0)
    assert isinstance(continuation.next_request(), inference_pb2.GenerateRequest)
    continuation.receive(delta(0, [1, 2]))
    continuation.failed(AlreadyExistsError("is live at another router"), 0.0)
    assert isinstance(continuation.next_request(), inference_pb2.ResumeRequest)


@pytest.mark.parametrize("is_budget_empty", [False, True])
def test_a_request_that_turns_out_to_be_live_is_resumed_after_any_number_of_refusals(
    is_budget_empty,
):
    budget = RetryBudget()
    policy = Retry()
    request = inference_pb2.GenerateRequest(resumable=True)
    continuation = Continuation(request, policy, budget)
    for _ in range(1 if is_budget_empty else policy.max_attempts - 1):
        continuation.failed(UnavailableError("no scheduler"), 0.0)
    while is_budget_empty and budget.failed():
        pass
    continuation.failed(AlreadyExistsError("is live at another router"), 0.0)
    assert isinstance(continuation.next_request(), inference_pb2.ResumeRequest)


def test_other_errors_are_final():
    continuation = make()
    continuation.receive(delta(0, [1]))
    with pytest.raises(InvalidArgumentError):
        continuation.failed(InvalidArgumentError("n", "is 0"), 0.0)


def test_without_resumable_only_a_refusal_is_tried_again_and_only_if_asked_for():
    with pytest.raises(UnavailableError):
        make(resumable=False).failed(LOST, 0.0)
    continuation = make(resumable=False, policy=Retry(max_attempts=3))
    continuation.failed(LOST, 0.0)
    assert isinstance(continuation.next_request(), inference_pb2.GenerateRequest)
    continuation.failed(TooBusyError("full"), 0.0)
    with pytest.raises(TooBusyError):
        continuation.failed(TooBusyError("full"), 0.0)
    continuation = make(resumable=False, policy=Retry())
    continuation.receive(delta(0, [1]))
    with pytest.raises(UnavailableError):
        continuation.failed(LOST, 0.0)


def test_a_service_that_only_fails_gets_no_retries_until_it_has_served_again():
    budget = RetryBudget(capacity=4)
    assert [budget.failed() for _ in range(4)] == [True, False, False, False]
    for _ in range(25):
        budget.succeeded()
    assert not budget.failed()
    for _ in range(16):
        budget.succeeded()
    assert budget.failed()


def test_the_wait_grows_and_has_a_limit():
    policy = Retry(first_backoff_s=0.1, max_backoff_s=1.0)
    for num_failures, most in ((1, 0.1), (2, 0.2), (4, 0.8), (5, 1.0), (5000, 1.0)):
        assert most / 2 <= policy.backoff_s(num_failures) <= most
