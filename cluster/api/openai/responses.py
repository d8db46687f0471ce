"""`POST /v1/responses`, for text and functions. Nothing is stored."""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.description import answers
from cluster.api.errors import bad_request
from cluster.api.openai.conversation import chat_ids, num_chars
from cluster.api.openai.generation import begin_generation
from cluster.api.openai.responses_answer import ResponsesAnswer
from cluster.api.openai.responses_body import ResponsesBody
from cluster.api.openai.responses_input import messages_of
from cluster.api.openai.responses_sampling import responses_sampling
from cluster.api.openai.responses_shapes import ResponseEvent, ResponseObject
from cluster.api.openai.tools.responses import responses_tool_use
from cluster.frontend.draft import Draft
from cluster.frontend.tokenizer import Tokenizer
from scheduler.errors import InvalidRequest

router = APIRouter(tags=["text"])

_STORED = {
    "previous_response_id": "send the whole conversation as input",
    "conversation": "send the whole conversation as input",
    "prompt": "send the prompt's own text",
}


@router.post("/v1/responses", responses=answers(ResponseObject, chunk=ResponseEvent))
async def create_response(request: Request, body: ResponsesBody) -> Response:
    """Answer a text or a conversation, with typed events if streamed."""
    generation = await begin_generation(request, body, "resp_")
    server, info = generation.server, generation.info
    _refuse_stored(body)
    messages = messages_of(body.input, body.instructions)
    tool_use = responses_tool_use(
        body.tools,
        body.tool_choice,
        is_parallel=body.parallel_tool_calls,
        parser=server.config.tool_parser,
        templates=server.chat_templates,
    )
    sampling = responses_sampling(body, server.engine.default_sampling(), info.defaults)
    drafting = generation.drafting(sampling)

    def drafts(tokenizer: Tokenizer | None) -> Sequence[Draft]:
        try:
            ids = chat_ids(
                tokenizer,
                messages,
                tools=None if tool_use is None else tool_use.described,
                template_options=body.chat_template_kwargs,
            )
            if tool_use is not None:
                return [tool_use.draft(drafting, ids, tokenizer)]
            return [drafting.draft(ids, tokenizer)]
        except InvalidRequest as error:
            if error.param in ("prompt", "messages"):
                error.param = "input"
            raise

    call = await generation.call(drafts, num_chars=num_chars(messages))
    answer = ResponsesAnswer(
        call,
        body,
        created=generation.created,
        model=generation.model,
        tool_use=tool_use,
        is_resumable=generation.is_resumable,
    )
    return await generation.answer(call, answer)


def _refuse_stored(body: ResponsesBody) -> None:
    for name, instead in _STORED.items():
        if getattr(body, name) is not None:
            raise bad_request(f"{name} refers to what is stored, and nothing is: {instead}", name)
