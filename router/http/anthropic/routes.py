"""The routes of Anthropic's Messages API."""

from aiohttp import web

from router.access.tenancy import with_precedence
from router.http.answers.streaming import use_model
from router.http.anthropic.answer import MessageCall, answer_message, stream_headers
from router.http.anthropic.body import CountBody, MessagesBody
from router.http.anthropic.errors import REQUEST_ID_HEADER, ROOT
from router.http.body import BodyReader
from router.http.endpoint import CallId, check_not_resumable, endpoint, json_response
from router.http.requests.conversation import Conversation
from router.request.cells import Cells
from router.request.inference import Inference


def messages_routes(cells: Cells, bodies: BodyReader) -> list[web.RouteDef]:
    """Return the routes."""

    async def create_message(request: web.Request, call_id: CallId) -> web.StreamResponse:
        """Answer a conversation; stream the answer if `stream` is set."""
        check_not_resumable(request)
        body = await bodies.read(request, MessagesBody, generates=True)
        headers = stream_headers(call_id.value)
        inference = await use_model(
            cells, body.model, request, headers, is_streamed=bool(body.stream)
        )
        inference.check_room(body.model)  # before the template is rendered
        max_model_len = inference.model.info(body.model).max_model_len
        prompt, plan = await (await _conversation(inference, body)).prepare(inference)
        asked = body.request(prompt, call_id.value, max_model_len=max_model_len)
        call = MessageCall(with_precedence(asked, request.headers), plan, body)
        return await answer_message(request, inference, call)

    async def count_tokens(request: web.Request, call_id: CallId) -> web.Response:
        """Count the tokens of a conversation's prompt."""
        body = await bodies.read(request, CountBody)
        inference = await cells.known(body.model)
        prompt, _ = await (await _conversation(inference, body)).prepare(inference)
        token_ids = await inference.text.tokenize(body.model, prompt, add_special_tokens=False)
        response = json_response({"input_tokens": len(token_ids)})
        response.headers[REQUEST_ID_HEADER] = call_id.value
        return response

    return [
        web.post(ROOT, endpoint(create_message)),
        web.post(f"{ROOT}/count_tokens", endpoint(count_tokens)),
    ]


async def _conversation(inference: Inference, body: CountBody) -> Conversation:
    """Convert a body to a chat, in a thread because the body may be long."""
    template = inference.text.chat_template(body.model)
    parsers = inference.text.parsers(template)
    return await inference.text.run(lambda: body.conversation(template, parsers))
