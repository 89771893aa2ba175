"""A beam search at the router: refusals, the message to the scheduler, and the outputs."""

import math

import pytest
from router_fake_scheduler import EOS, LENGTH, STOP

from contract.codec.outputs import event_to_proto
from contract.codec.request import generate_request_from_proto
from contract.errors import InvalidArgumentError
from contract.outputs import FinishReason, OutputDelta, OutputFinished, Usage
from contract.request import GenerateRequest, Model
from contract.sampling import BeamSearch, EarlyStopping, SamplingParams, StructuredOutput
from quire.v1 import common_pb2, inference_pb2
from router.request.validation import check_request

MODEL = Model("tiny", 64, vocab_size=50, eos_token_ids=(1,), structured_output=True)
BEAM = BeamSearch(4)


def check(beam=BEAM, **kwargs):
    check_request(GenerateRequest(prompt=(3,), beam=beam, **kwargs), MODEL, 1000)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"beam": BeamSearch(1)}, "beam.width is 1; it must be in [2, 10]"),
        ({"beam": BeamSearch(11)}, "beam.width is 11; it must be in [2, 10]"),
        ({"n": 5}, "n is 5; it must be in [1, 4]"),
        ({"beam": BeamSearch(2, -5.5)}, "beam.length_penalty is -5.5; it must be in [-5, 5]"),
        ({"beam": BeamSearch(2, math.nan)}, "beam.length_penalty is nan; it must be in [-5, 5]"),
        ({"stop": ("x",)}, "stop has 1 entries; with beam it must have none"),
        (
            {"sampling": SamplingParams(stop_token_ids=tuple(range(2, 14)))},
            (
                "beam.width is 4; with 13 tokens that end an output, the vocabulary must have at"
                " least 56 tokens, and has 50"
            ),
        ),
    ],
)
def test_invalid_searches_are_refused(kwargs, message):
    with pytest.raises(InvalidArgumentError) as caught:
        check(**kwargs)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 5),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {3: 1.0}),
        ("logprobs", 0),
        ("prompt_logprobs", 0),
        ("structured", StructuredOutput(regex="a+")),
    ],
)
def test_parameters_that_change_a_draw_are_refused_by_name(field, value):
    with pytest.raises(InvalidArgumentError, match=f"sampling.{field} is set; with beam"):
        check(sampling=SamplingParams(**{field: value}))


def test_only_the_models_own_distribution_counts():
    for temperature in (0.0, 1.0):
        check(sampling=SamplingParams(temperature=temperature, seed=3, min_tokens=2))
    with pytest.raises(InvalidArgumentError, match=r"sampling\.temperature is 0\.5; with"):
        check(sampling=SamplingParams(temperature=0.5))


@pytest.mark.parametrize("stopping", EarlyStopping)
def test_every_field_is_read(stopping):
    number = common_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{stopping.name}")
    beam = common_pb2.BeamSearch(width=3, length_penalty=0.0, early_stopping=number)
    message = inference_pb2.GenerateRequest(text="x", beam=beam)
    assert generate_request_from_proto(message).beam == BeamSearch(3, 0.0, stopping)


def test_defaults_are_those_of_the_contract():
    message = inference_pb2.GenerateRequest(text="x", beam=common_pb2.BeamSearch(width=2))
    assert generate_request_from_proto(message).beam == BeamSearch(2)
    assert BeamSearch(2) == BeamSearch(2, 1.0, EarlyStopping.HEURISTIC)
    message.beam.early_stopping = 9
    with pytest.raises(InvalidArgumentError, match=r"beam\.early_stopping is 9"):
        generate_request_from_proto(message)


async def test_outputs_come_whole_with_their_log_probabilities(router):
    request = GenerateRequest(prompt=(5, 6), beam=BeamSearch(3, 0.5, EarlyStopping.NEVER), n=2)
    live = await router.inference.generate(request)
    submit = await router.scheduler.submits.get()
    assert (submit.n, submit.beam.width, submit.beam.length_penalty) == (2, 3, 0.5)
    assert submit.beam.early_stopping == common_pb2.EARLY_STOPPING_NEVER
    key, tokens = submit.first_seq_key, router.tokens(" wörld")
    await router.scheduler.step(
        {key: tokens, key + 1: [*tokens, EOS]},
        finished={key: LENGTH, key + 1: STOP},
        stop_token_id=EOS,
        cumulative_logprob=-1.5,
    )
    events = [event async for event in live]
    assert events == [
        OutputDelta(0, 0, tuple(tokens), " wörld"),
        OutputFinished(0, FinishReason.LENGTH, cumulative_logprob=-1.5),
        OutputDelta(1, 0, (*tokens, EOS), " wörld"),
        OutputFinished(1, FinishReason.STOP, cumulative_logprob=-1.5),
        Usage(2, 2 * len(tokens) + 1, 0),
    ]
    assert event_to_proto("r", events[1]).finished.cumulative_logprob == -1.5


async def test_a_search_is_submitted_again_as_it_was(router):
    request = GenerateRequest(prompt=(5, 6), beam=BeamSearch(3), n=2)
    async with await router.inference.generate(request):
        first = await router.scheduler.submits.get()
        await router.scheduler.stop()
        await router.scheduler.start()
        first.is_again = True
        assert await router.scheduler.submits.get() == first
