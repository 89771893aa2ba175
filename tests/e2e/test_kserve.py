"""Triton's own client, unmodified, uses the Open Inference Protocol of a whole service."""

import json
import subprocess
import sys
from pathlib import Path

from quire.v1 import common_pb2, inference_pb2
from tests.e2e.service import Service

PROGRAM = Path(__file__).parent / "triton_client.py"
PROMPT = "one two three"


def test_tritonclient_finds_infers_and_streams(service: Service) -> None:
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    request = inference_pb2.GenerateRequest(text=PROMPT, sampling=sampling)
    ours = service.stub.GenerateOnce(inference_pb2.GenerateOnceRequest(request=request), timeout=60)
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), service.target, service.model, PROMPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert [seen["live"], seen["ready"], seen["model_ready"]] == [True, True, True]
    assert seen["server"] == "quire"
    assert seen["inputs"][:3] == ["text_input", "stream", "sampling_parameters"]
    text = ours.outputs[0].text
    assert seen["text"] == "".join(seen["stream"]) == "".join(seen["aio_stream"]) == text
    assert len(seen["stream"]) > 2, "it was not streamed"
    code, message = seen["error"]
    assert (code, message[:15]) == ("StatusCode.INVALID_ARGUMENT", "max_tokens is 0")
    assert seen["stream_errors"] == ["temperature is -1.0; it must be in [0, 100]"]
    service.wait_until_idle()
