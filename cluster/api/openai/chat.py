"""`POST /v1/chat/completions`."""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.description import answers
from cluster.api.openai.chat_answer import ChatAnswer
from cluster.api.openai.chat_body import ChatBody
from cluster.api.openai.chat_shapes import ChatChunk, ChatCompletion
from cluster.api.openai.conversation import chat_ids, num_chars
from cluster.api.openai.generation import begin_generation
from cluster.api.openai.sampling import chat_sampling
from cluster.api.openai.tools.chat import chat_tool_use
from cluster.frontend.draft import Draft
from cluster.frontend.tokenizer import Tokenizer
from scheduler.errors import InvalidRequest

router = APIRouter(tags=["text"])


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, chunk=ChatChunk))
async def create_chat_completion(request: Request, body: ChatBody) -> Response:
    """Go on with a conversation."""
    generation = await begin_generation(request, body, "chatcmpl-")
    info, engine = generation.info, generation.server.engine
    sampling = chat_sampling(body, engine.default_sampling(), info.defaults)
    tool_use = chat_tool_use(
        body.tools,
        body.tool_choice,
        is_parallel=body.parallel_tool_calls,
        parser=generation.server.config.tool_parser,
        templates=generation.server.chat_templates,
    )
    drafting = generation.drafting(sampling)

    def drafts(tokenizer: Tokenizer | None) -> Sequence[Draft]:
        try:
            ids = chat_ids(
                tokenizer,
                body.messages,
                tools=None if tool_use is None else tool_use.described,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_options=body.chat_template_kwargs,
            )
            if tool_use is not None:
                return [tool_use.draft(drafting, ids, tokenizer)]
            return [drafting.draft(ids, tokenizer)]
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = "messages"
            raise

    call = await generation.call(drafts, num_chars=num_chars(body.messages))
    answer = ChatAnswer(
        call,
        body,
        created=generation.created,
        model=generation.model,
        tool_use=tool_use,
        is_resumable=generation.is_resumable,
    )
    return await generation.answer(call, answer)
