"""A program with Triton's own client. Its stubs cannot share a process with Quire's.

Usage: triton_client.py TARGET MODEL PROMPT. Prints one JSON object.
"""

import asyncio
import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

TARGET, MODEL, PROMPT = sys.argv[1:]
SAMPLING = {"temperature": "0", "max_tokens": "100", "ignore_eos": "true"}


def tensor(name, value, datatype, dtype):
    given = triton.InferInput(name, [1], datatype)
    given.set_data_from_numpy(np.array([value], dtype=dtype))
    return given


def inputs(*, stream, sampling=SAMPLING):
    """Inputs as in Triton's example for its vLLM backend."""
    return [
        tensor("text_input", PROMPT.encode(), "BYTES", np.object_),
        tensor("stream", stream, "BOOL", bool),
        tensor("exclude_input_in_output", True, "BOOL", bool),
        tensor("sampling_parameters", json.dumps(sampling).encode(), "BYTES", np.object_),
    ]


def text(result):
    return result.as_numpy("text_output")[0].decode()


def answers_of_a_stream(client):
    """Two requests in one stream, one of them bad: the texts of each, and the errors."""
    answers = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    client.async_stream_infer(MODEL, inputs(stream=True), request_id="good")
    bad = {**SAMPLING, "temperature": "-1"}
    client.async_stream_infer(MODEL, inputs(stream=True, sampling=bad), request_id="bad")
    texts, errors, ended = [], [], False
    while not (ended and errors):
        result, error = answers.get(timeout=60)
        if error is not None:
            errors.append(error.message())
            continue
        response = result.get_response()
        assert response.id == "good"
        texts.append(text(result))
        ended = response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    return texts, errors


async def streamed_by_asyncio():
    async def requests():
        yield {
            "model_name": MODEL,
            "inputs": inputs(stream=True),
            "outputs": [triton.InferRequestedOutput("text_output")],
            "request_id": "1",
            "parameters": SAMPLING,
        }

    async with triton_aio.InferenceServerClient(TARGET) as client:
        answers = client.stream_infer(inputs_iterator=requests())
        texts = []
        async for result, error in answers:
            assert error is None, error
            texts.append(text(result))
        return texts


def main():
    with triton.InferenceServerClient(TARGET) as client:
        metadata = client.get_model_metadata(MODEL)
        try:
            client.infer(MODEL, inputs(stream=False, sampling={"max_tokens": 0}))
            error = None
        except InferenceServerException as refused:
            error = [refused.status(), refused.message()]
        texts, stream_errors = answers_of_a_stream(client)
        seen = {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": client.is_model_ready(MODEL),
            "server": client.get_server_metadata().name,
            "inputs": [tensor.name for tensor in metadata.inputs],
            "text": text(client.infer(MODEL, inputs(stream=False))),
            "error": error,
            "stream": texts,
            "stream_errors": stream_errors,
            "aio_stream": asyncio.run(streamed_by_asyncio()),
        }
    sys.stdout.write(json.dumps(seen))


main()
