"""`POST /v1/completions`."""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.description import answers
from cluster.api.openai.completion_answer import CompletionAnswer
from cluster.api.openai.completion_body import CompletionBody
from cluster.api.openai.completion_shapes import Completion, CompletionChunk
from cluster.api.openai.generation import begin_generation
from cluster.api.openai.prompts import encoded, listed_prompts, num_chars
from cluster.api.openai.sampling import completion_sampling
from cluster.frontend.draft import Draft
from cluster.frontend.tokenizer import Tokenizer

router = APIRouter(tags=["text"])


@router.post("/v1/completions", responses=answers(Completion, chunk=CompletionChunk))
async def create_completion(request: Request, body: CompletionBody) -> Response:
    """Go on with one or more prompts."""
    generation = await begin_generation(request, body, "cmpl-")
    server = generation.server
    prompts = listed_prompts(body.prompt, server.config.max_prompts_per_request)
    sampling = completion_sampling(body, server.engine.default_sampling())
    drafting = generation.drafting(sampling, num_prompts=len(prompts))
    adds_special = body.add_special_tokens is not False

    def drafts(tokenizer: Tokenizer | None) -> Sequence[Draft]:
        found: list[Draft] = []
        for prompt in prompts:
            ids, text = encoded(prompt, tokenizer, add_special_tokens=adds_special)
            found.append(drafting.draft(ids, tokenizer, text))
        return found

    call = await generation.call(drafts, num_chars=num_chars(prompts))
    answer = CompletionAnswer(
        call,
        body,
        created=generation.created,
        model=generation.model,
        is_resumable=generation.is_resumable,
    )
    return await generation.answer(call, answer)
