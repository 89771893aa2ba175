"""The routes of Anthropic's Messages API."""

from dataclasses import replace

from aiohttp import web

from router.access.tenancy import with_precedence
from router.http.anthropic.answer import MessageCall, answer_message
from router.http.anthropic.body import FIELD_TO_JSON, CountBody, MessagesBody
from router.http.anthropic.errors import REQUEST_ID_HEADER, ROOT
from router.http.body import BodyReader
from router.http.endpoint import CallId, endpoint, json_response
from router.http.requests.chat import ChatBody, PlannedChat, plan_chat, template_arguments
from router.http.requests.messages import for_template
from router.request.inference import Inference


def routes(inference: Inference, bodies: BodyReader) -> list[web.RouteDef]:
    """Return the routes; `bodies` reads their bodies."""

    async def create_message(request: web.Request, call_id: CallId) -> web.StreamResponse:
        """Continue a conversation, as Anthropic's API does; streamed on request."""
        body = await bodies.read(request, MessagesBody, generates=True)
        inference.check_room(body.model)  # before the template is rendered
        chat = await _chat(inference, body)
        planned = await plan_chat(inference, chat, call_id.value)
        call = MessageCall(
            _completed(planned, request),
            stream=body.stream,
            max_tokens=body.max_tokens,
            shows_thinking=body.shows_thinking,
        )
        return await answer_message(request, inference, call)

    async def count_tokens(request: web.Request, call_id: CallId) -> web.Response:
        """Count the tokens of the prompt that a message has."""
        body = await bodies.read(request, CountBody)
        chat = await _chat(inference, body)
        template = inference.text.chat_template(chat.model)
        tools = chat.tool_use(template, inference.text.parsers(template))
        token_ids = await inference.text.tokenize_chat(
            chat.model,
            for_template(chat.messages),
            template,
            **template_arguments(chat, template, tools),
        )
        response = json_response({"input_tokens": len(token_ids)})
        response.headers[REQUEST_ID_HEADER] = call_id.value
        return response

    return [
        web.post(ROOT, endpoint(create_message)),
        web.post(f"{ROOT}/count_tokens", endpoint(count_tokens)),
    ]


async def _chat(inference: Inference, body: CountBody) -> ChatBody:
    """Return the chat that a body is; a thread makes it, since it may be long."""
    template = inference.text.chat_template(body.model)
    parsers = inference.text.parsers(template)
    fields = {}
    if isinstance(body, MessagesBody):
        most = inference.model.info(body.model).max_model_len
        fields = {
            "max_tokens": min(body.max_tokens, most),
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
            "cache_pin_s": body.cache_pin_s,
        }
    return await inference.text.run(lambda: body.chat(template, parsers, **fields))


def _completed(planned: PlannedChat, http: web.Request) -> PlannedChat:
    request = replace(with_precedence(planned.request, http.headers), cuts_max_tokens=True)
    names = {**planned.field_to_json, **FIELD_TO_JSON}
    return replace(planned, request=request, field_to_json=names)
