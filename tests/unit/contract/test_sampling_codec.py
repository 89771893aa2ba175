"""Sampling parameters and requests keep each field through protobuf."""

from dataclasses import fields

import pytest

from contract.codec.request import generate_request_from_proto, generate_request_to_proto
from contract.codec.sampling import sampling_from_proto, sampling_to_proto
from contract.errors import InvalidArgumentError
from contract.lora import LoraAdapter
from contract.pooling import Pooling, PoolingKind
from contract.request import GenerateRequest
from contract.sampling import BeamSearch, EarlyStopping, SamplingParams, StructuredOutput
from quire.v1 import common_pb2, inference_pb2

ALL_SET = SamplingParams(
    temperature=0.0,
    top_k=3,
    top_p=0.5,
    min_p=0.25,
    repetition_penalty=2.0,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    seed=0,
    logit_bias={0: 1.5, 7: -100.0},
    max_tokens=9,
    min_tokens=2,
    stop_token_ids=(4, 0),
    ignore_eos=True,
    allowed_token_ids=(0, 5),
    logprobs=0,
    prompt_logprobs=5,
    structured=StructuredOutput(choice=("a", "b")),
    adapter=LoraAdapter("sql", b"d" * 32),
    pooling=Pooling(PoolingKind.MEAN, normalize=True, dimensions=8, num_first_tokens=3),
)


def test_the_class_has_the_fields_of_the_message():
    names = {field.name for field in fields(SamplingParams)}
    assert names == set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def test_all_fields_of_a_full_message_come_back():
    message = sampling_to_proto(ALL_SET)
    assert len(message.ListFields()) == len(message.DESCRIPTOR.fields)
    assert sampling_from_proto(message) == ALL_SET


@pytest.mark.parametrize("field", fields(SamplingParams), ids=lambda field: field.name)
def test_one_field_alone_comes_back_and_the_others_are_unset(field):
    params = SamplingParams(**{field.name: getattr(ALL_SET, field.name)})
    message = sampling_to_proto(params)
    assert [descriptor.name for descriptor, _ in message.ListFields()] == [field.name]
    assert sampling_from_proto(message) == params


def test_a_default_that_is_set_means_what_an_unset_one_does():
    message = common_pb2.SamplingParams(temperature=1.0, top_p=1.0, repetition_penalty=1.0)
    assert sampling_from_proto(message) == SamplingParams()
    assert sampling_to_proto(SamplingParams()).ListFields() == []


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutput(json_schema='{"type": "object"}'),
        StructuredOutput(json_object=True),
        StructuredOutput(regex=""),
        StructuredOutput(choice=()),
        StructuredOutput(grammar="start: x"),
    ],
    ids=lambda form: form.form,
)
def test_each_form_comes_back(form):
    params = SamplingParams(structured=form)
    assert sampling_from_proto(sampling_to_proto(params)) == params


@pytest.mark.parametrize(
    ("form", "given"),
    [
        (StructuredOutput(), "nothing"),
        (StructuredOutput(regex="a", grammar="start: b"), "regex, grammar"),
    ],
)
def test_exactly_one_form_can_be_sent(form, given):
    with pytest.raises(InvalidArgumentError, match=f"structured sets {given}; it must set exactly"):
        sampling_to_proto(SamplingParams(structured=form))


@pytest.mark.parametrize("prompt", ["text", "", (5, 0), ()])
def test_a_request_comes_back(prompt):
    request = GenerateRequest(
        prompt,
        model="m",
        request_id="r",
        sampling=ALL_SET,
        stop=("x", "y"),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        n=3,
        beam=BeamSearch(4, 0.0, EarlyStopping.NEVER),
        cache_salt="s",
        cache_pin_s=2.5,
        truncate_prompt_tokens=7,
        bad_words=("bad",),
        resumable=True,
        stream_interval=8,
    )
    message = generate_request_to_proto(request)
    assert len(message.ListFields()) == len(message.DESCRIPTOR.fields) - 1  # one kind of prompt
    message.sampling.ClearField("adapter")  # a client names it in `model`
    message.sampling.ClearField("pooling")  # a client calls Embed
    back = generate_request_from_proto(message)
    assert back.prompt == prompt
    assert generate_request_to_proto(back) == message


def test_a_field_that_the_message_lacks_is_not_dropped_in_silence():
    with pytest.raises(ValueError, match="add_special_tokens"):
        generate_request_to_proto(GenerateRequest("a", add_special_tokens=False))


def test_a_request_needs_a_prompt_and_names_no_adapter():
    with pytest.raises(InvalidArgumentError, match="prompt is not set"):
        generate_request_from_proto(inference_pb2.GenerateRequest())
    message = inference_pb2.GenerateRequest(text="a")
    message.sampling.adapter.name = "sql"
    with pytest.raises(InvalidArgumentError, match="name the adapter in model"):
        generate_request_from_proto(message)
