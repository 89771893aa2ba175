"""Structured outputs have their form beside any other requests, and do not change those."""

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire.v1 import common_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.generation import Result, generate_request, read_aio
from tests.e2e.service import Service

SHIPPED_MODEL = Path(__file__).parents[2] / "models" / "quire-tiny-python"
NUM_SCHEMAS = 200
PROMPT = "def parse(text):\n    "


@pytest.fixture(scope="module")
def shipped(run_dir: Callable[[], Path]) -> Iterator[Service]:
    with Service(run_dir(), SHIPPED_MODEL, worker=["--dtype=float32"]) as service:
        yield service


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema with bounds everywhere, so that documents are short."""
    kinds = ["string", "integer", "boolean", "null", "enum", "pattern"]
    kind = draw.choice(kinds + ["object", "array", "anyOf"] * (depth < 2))
    match kind:
        case "string":
            return {"type": "string", "maxLength": draw.randint(0, 12)}
        case "pattern":
            return {
                "type": "string",
                "pattern": draw.choice(["^[a-f]{1,6}$", "^x[0-9]?y{0,4}z$|^$"]),
            }
        case "integer":
            least = draw.randint(-1000, 1000)
            return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 500)}
        case "enum":
            return {"enum": draw.sample(["a", "é🙂", 'q"\\', 7, -1, True, None], 3)}
        case "object":
            names = draw.sample(["a", "name", "x y", "ü", "list"], draw.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth + 1) for name in names},
                "required": draw.sample(names, draw.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            return {
                "type": "array",
                "items": random_schema(draw, depth + 1),
                "minItems": draw.randint(0, 1),
                "maxItems": draw.randint(1, 3),
            }
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
    return {"type": kind}


async def generate_all(service: Service, requests: list[Any]) -> list[Result]:
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        return await asyncio.gather(*(read_aio(stub.Generate(each)) for each in requests))


def free_request(seed: int) -> Any:
    return generate_request(PROMPT, temperature=1.0, seed=seed, max_tokens=48, ignore_eos=True)


async def test_200_random_schemas_give_documents_that_validate_and_free_requests_do_not_notice(
    shipped: Service,
):
    draw = random.Random(3)
    schemas = [random_schema(draw) for _ in range(NUM_SCHEMAS)]
    structured = [
        generate_request(
            PROMPT,
            temperature=draw.choice([0.0, 1.0]),
            seed=i,
            max_tokens=800,
            structured={"json_schema": json.dumps(schema)},
        )
        for i, schema in enumerate(schemas)
    ]
    free = [free_request(seed) for seed in range(16)]
    alone = [result.outputs for result in await generate_all(shipped, free)]
    results = await generate_all(shipped, structured + free)
    wrong = []
    for schema, result in zip(schemas, results, strict=False):
        assert result.finished[0].finish_reason == common_pb2.FINISH_REASON_STOP
        try:
            jsonschema.validate(json.loads(result.text.get(0, "")), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append((schema, result.text, error))
    assert not wrong
    assert [result.outputs for result in results[NUM_SCHEMAS:]] == alone


async def test_every_output_of_a_request_keeps_to_the_form(shipped: Service):
    request = generate_request(
        PROMPT,
        n=4,
        temperature=1.0,
        seed=5,
        max_tokens=200,
        structured={"regex": "[a-z]{3,9}(-[0-9]{2}){2}"},
    )
    (result,) = await generate_all(shipped, [request])
    assert len(result.text) == 4
    assert all(re.fullmatch("[a-z]{3,9}(-[0-9]{2}){2}", text) for text in result.text.values())


async def test_what_a_small_pool_preempts_keeps_to_its_form(run_dir: Callable[[], Path]):
    def request(seed: int) -> Any:
        return generate_request(
            PROMPT,
            temperature=1.0,
            seed=seed,
            max_tokens=120,
            structured={"regex": "([a-z]{2}[0-9]{2}){20}"},
        )

    requests = [request(seed) for seed in range(8)]
    flags = ["--dtype=float32", "--max-model-len=160", "--block-size=4"]
    with Service(run_dir(), SHIPPED_MODEL, worker=[*flags, "--num-blocks=512"]) as service:
        expected = [result.text for result in await generate_all(service, requests)]
    with Service(run_dir(), SHIPPED_MODEL, worker=[*flags, "--num-blocks=48"]) as service:
        results = await generate_all(service, requests)
        assert service.metrics(service.scheduler)["quire_num_preemptions_total"] > 0
    assert [result.text for result in results] == expected
    assert all(re.fullmatch("([a-z]{2}[0-9]{2}){20}", result.text[0]) for result in results)
