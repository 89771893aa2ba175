"""POST /v1/embeddings (OpenAI's API), /rerank (Cohere's and Jina's) and /score (vLLM's)."""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

from aiohttp import web
from pydantic import Field, PlainValidator

from contract.errors import InvalidArgumentError
from contract.pooling import PoolingKind
from contract.request import GenerateRequest
from router.access.tenancy import with_precedence
from router.http.answers.objects import Json
from router.http.body import BodyReader
from router.http.endpoint import CallId, endpoint, json_response
from router.http.requests.completions import Prompts, parse_prompts
from router.http.requests.shared_fields import RequestId
from router.http.strict_json import Listed, Schema, at_most, json_bytes
from router.request.cells import Cells
from router.request.inference import Inference
from router.request.vectors import (
    MAX_AT_ONCE,
    MAX_INPUTS,
    MAX_NUMBERS,
    Vector,
    check_inputs,
    make_vectors,
    pooling_of,
    score_pairs,
)


def embedding_routes(cells: Cells, bodies: BodyReader) -> list[web.RouteDef]:
    """Return the routes."""

    async def create_embeddings(request: web.Request, call_id: CallId) -> web.Response:
        """Turn texts or token ids into embeddings."""
        body = await bodies.read(request, EmbeddingsBody, generates=True)
        call_id.value = body.request_id or call_id.value
        inference = await cells.use(body.model)
        return await _embeddings_response(inference, body, call_id.value, request.headers)

    async def create_ranking(request: web.Request, call_id: CallId) -> web.Response:
        """Rank documents by how well they answer a query, as Cohere and Jina do."""
        body = await bodies.read(request, RerankBody, generates=True)
        call_id.value = body.request_id or call_id.value
        inference = await cells.use(body.model)
        return json_response(await _rerank(inference, body, call_id.value, request.headers))

    async def create_scores(request: web.Request, call_id: CallId) -> web.Response:
        """Score pairs of texts, as vLLM does."""
        body = await bodies.read(request, ScoreBody, generates=True)
        call_id.value = body.request_id or call_id.value
        inference = await cells.use(body.model)
        return json_response(await _score(inference, body, call_id.value, request.headers))

    return [
        web.post("/v1/embeddings", endpoint(create_embeddings)),
        web.post("/rerank", endpoint(create_ranking)),
        web.post("/v1/rerank", endpoint(create_ranking)),
        web.post("/v2/rerank", endpoint(create_ranking)),
        web.post("/score", endpoint(create_scores)),
        web.post("/v1/score", endpoint(create_scores)),
    ]


class _Body(Schema):
    model: str = ""
    request_id: RequestId | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """A field of vLLM: the limit on an input's tokens; -1: as many as fit the model. The text of a
    longer input is cut at its end."""
    user: str = ""

    def requests(
        self, prompts: Prompts, request_id: str, headers: Mapping[str, str], *, special: bool = True
    ) -> list[GenerateRequest]:
        """Return one request for each input."""
        return [
            with_precedence(
                GenerateRequest(
                    prompt=prompt,
                    model=self.model,
                    request_id=f"{request_id}-{i}",
                    add_special_tokens=special,
                    truncate_prompt_tokens=self.truncate_prompt_tokens,
                ),
                headers,
            )
            for i, prompt in enumerate(prompts)
        ]


class EmbeddingsBody(_Body):
    """POST /v1/embeddings."""

    input: Annotated[
        Prompts, PlainValidator(lambda value: parse_prompts(value, "input", MAX_INPUTS))
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    add_special_tokens: bool = True

    # Quire extensions.
    pooling: Literal["last", "mean", "cls"] | None = None
    normalize: bool | None = None


async def _embeddings_response(
    inference: Inference, body: EmbeddingsBody, request_id: str, headers: Mapping[str, str]
) -> web.Response:
    requests = body.requests(body.input, request_id, headers, special=body.add_special_tokens)
    answer = await embed(inference, body, requests)
    # A thread writes the JSON, because writing a million numbers would delay other calls.
    content = await inference.text.run(lambda: json_bytes(answer()))
    return web.Response(body=content, content_type="application/json")


async def embed(
    inference: Inference,
    body: EmbeddingsBody,
    requests: Sequence[GenerateRequest],
    *,
    max_at_once: int = MAX_AT_ONCE,
    max_numbers: int = MAX_NUMBERS,
) -> Callable[[], Json]:
    """Compute the embeddings for `requests`, which come from `body.requests`.

    Return a function that makes the answer, and that any thread may call. May raise QuireError.
    """
    model = inference.model.info(body.model)
    check_inputs("input", len(body.input), model, body.dimensions, max_numbers)
    pooling = pooling_of(
        model,
        None if body.pooling is None else PoolingKind(body.pooling),
        normalize=body.normalize,
        dimensions=body.dimensions,
    )
    vectors = await make_vectors(
        inference, requests, pooling, _name("input", requests), max_at_once=max_at_once
    )
    encode = _as_base64 if body.encoding_format == "base64" else _as_numbers
    num_tokens = sum(vector.num_tokens for vector in vectors)

    def answer() -> Json:
        data = [
            {"object": "embedding", "index": i, "embedding": encode(vector)}
            for i, vector in enumerate(vectors)
        ]
        usage = _usage_json(num_tokens)
        return {"object": "list", "data": data, "model": model.id, "usage": usage}

    return answer


def _name(field: str, inputs: Sequence[object]) -> Callable[[int], str]:
    """Return a function from an input's index to its name in errors, such as "input[2]"."""
    return (field if len(inputs) == 1 else field + "[{}]").format


def _as_numbers(vector: Vector) -> list[float]:
    numbers: list[float] = vector.values.tolist()
    return numbers


def _as_base64(vector: Vector) -> str:
    return base64.b64encode(vector.values.astype("<f4").tobytes()).decode()


def _usage_json(num_tokens: int) -> Json:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


class _Document(Schema):
    text: str


class RerankBody(_Body):
    """POST /rerank."""

    query: str
    documents: Annotated[Listed[str | _Document], at_most(MAX_INPUTS), Field(min_length=1)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True


async def _rerank(
    inference: Inference, body: RerankBody, request_id: str, headers: Mapping[str, str]
) -> Json:
    """Answer /rerank; may raise QuireError."""
    texts = tuple(each if isinstance(each, str) else each.text for each in body.documents)
    scores = await score_pairs(
        inference,
        body.requests((body.query,), f"{request_id}-query", headers),
        body.requests(texts, request_id, headers),
        lambda _: "query",
        "documents[{}]".format,
    )
    best = sorted(range(len(texts)), key=lambda i: -scores.values[i])[: body.top_n]
    return {
        "id": f"rerank-{request_id}",
        "model": inference.model.info(body.model).id,
        "usage": _usage_json(scores.num_tokens),
        "results": [
            {
                "index": i,
                "relevance_score": scores.values[i],
                **({"document": {"text": texts[i]}} if body.return_documents else {}),
            }
            for i in best
        ],
    }


def _listed_texts(value: object, field: str) -> tuple[str, ...]:
    texts = parse_prompts(value, field, MAX_INPUTS)
    if not all(isinstance(text, str) for text in texts):
        raise InvalidArgumentError(
            field, "has token ids; it must be a string, or a list of strings"
        )
    return tuple(map(str, texts))


class ScoreBody(_Body):
    """POST /score."""

    text_1: Annotated[Sequence[str], PlainValidator(lambda value: _listed_texts(value, "text_1"))]
    text_2: Annotated[Sequence[str], PlainValidator(lambda value: _listed_texts(value, "text_2"))]


async def _score(
    inference: Inference, body: ScoreBody, request_id: str, headers: Mapping[str, str]
) -> Json:
    """Answer /score; may raise QuireError."""
    if len(body.text_1) not in {1, len(body.text_2)}:
        raise InvalidArgumentError(
            "text_1",
            f"has {len(body.text_1)} entries; it must have 1 or as many as text_2,"
            f" {len(body.text_2)}",
        )
    scores = await score_pairs(
        inference,
        body.requests(tuple(body.text_1), f"{request_id}-1", headers),
        body.requests(tuple(body.text_2), request_id, headers),
        _name("text_1", body.text_1),
        _name("text_2", body.text_2),
    )
    return {
        "id": f"score-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": inference.model.info(body.model).id,
        "data": [
            {"index": i, "object": "score", "score": value} for i, value in enumerate(scores.values)
        ],
        "usage": _usage_json(scores.num_tokens),
    }
