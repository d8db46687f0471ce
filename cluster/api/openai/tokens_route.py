"""`POST /tokenize` and `POST /detokenize`: text to token ids and back, as requests do it."""

from typing import Annotated

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, Struct, UnsetType
from pydantic import BaseModel, ConfigDict, Field, SkipValidation
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.api_server import ApiServer, server_of
from cluster.api.description import answers
from cluster.api.errors import bad_request
from cluster.api.openai.chat_body import MessagesField
from cluster.api.openai.conversation import chat_ids, num_chars
from cluster.frontend.tokenizer import Tokenizer

router = APIRouter(tags=["tokens"])


class TokenizeBody(BaseModel):
    """Either a prompt or messages."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="One of `GET /v1/models`.")
    prompt: str | None = Field(None, description="A text, encoded as /v1/completions does.")
    messages: MessagesField | None = Field(
        None, description="A conversation, encoded as /v1/chat/completions does."
    )
    add_special_tokens: bool | None = Field(
        None, description="Put the model's begin token before the prompt. True."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[dict[str, object]] | None = None
    return_token_strs: bool | None = Field(None, description="Also give each token as text.")


class Tokens(Struct, frozen=True, kw_only=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeBody(BaseModel):
    """Token ids."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="One of `GET /v1/models`.")
    tokens: Annotated[list[int], SkipValidation] = Field(description="Ids of the vocabulary.")


class Text(Struct, frozen=True, kw_only=True):
    """Answer of /detokenize."""

    prompt: str


@router.post("/tokenize", responses=answers(Tokens))
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """The token ids of a text or a conversation; nothing is computed by the model."""
    server = await _with_tokenizer(request, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")

    def work(tokenizer: Tokenizer | None) -> Tokens:
        assert tokenizer is not None
        ids = _ids(body, tokenizer)
        return Tokens(
            count=len(ids),
            max_model_len=server.info.max_model_len,
            tokens=ids,
            token_strs=[tokenizer.token_text(token_id) for token_id in ids]
            if body.return_token_strs
            else UNSET,
        )

    length = num_chars(body.messages) if body.prompt is None else len(body.prompt)
    return _json(await server.encode(work, num_chars=length))


@router.post("/detokenize", responses=answers(Text))
async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """The text of token ids, special ones included."""
    server = await _with_tokenizer(request, body.model)
    ids: object = body.tokens
    most = server.info.vocab_size
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise bad_request("tokens must be a list of token ids", "tokens")
    for wrong in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= wrong < most:
            raise bad_request(
                f"tokens holds id {wrong}; the model's vocabulary has ids 0 to {most - 1}", "tokens"
            )

    def work(tokenizer: Tokenizer | None) -> Text:
        assert tokenizer is not None
        return Text(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))

    return _json(await server.encode(work, num_chars=len(body.tokens)))


async def _with_tokenizer(request: Request, model: str | None) -> ApiServer:
    server = server_of(request)
    info = await server.loaded()
    server.model_named(model)
    if not info.tokenizer_digest:
        raise bad_request("the engine's model has no tokenizer", "model")
    return server


def _ids(body: TokenizeBody, tokenizer: Tokenizer) -> list[int]:
    if body.prompt is not None:
        adds_special = body.add_special_tokens is not False
        return tokenizer.encode(body.prompt, add_special_tokens=adds_special)
    return chat_ids(
        tokenizer,
        body.messages or [],
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_options=body.chat_template_kwargs,
    )


def _json(answer: Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
