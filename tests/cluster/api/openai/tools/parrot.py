"""A model that says what its user said last, and clients that ask it to."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
from openai.types.chat import ChatCompletion

from cluster.messages.sockets import ToClient
from scheduler.request import Finish, Request
from tests.cluster.api.rig import ApiRig, spoken
from tests.cluster.frontend.fake_engine import make_info
from tests.cluster.frontend.tiny_tokenizers import llama3_like, make_tokenizer

_LAST_TURN = re.compile(r"(?s).*<\|im_start\|>user\n(.*?)<\|im_end\|>")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "time")
]
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🌧"}}\n</tool_call>'
TWO = f'Let me look.\n{ONE}\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>'
BROKEN = "<tool_call>weather in Köln</tool_call>"


def repeat(request: Request) -> list[ToClient]:
    """Its user's text and the end token, as many tokens in each step as the seed says."""
    tokenizer = make_tokenizer("llama3_like")
    prompt = tokenizer.decode(request.prompt.tolist(), skip_special_tokens=False)
    found = _LAST_TURN.match(prompt)
    assert found, prompt
    ids = [*tokenizer.encode(found[1], add_special_tokens=False), request.end_ids[0]]
    limit = request.sampling.max_tokens or 0
    finish = Finish.STOP if limit >= len(ids) else Finish.LENGTH
    return spoken(request, ids[:limit], finish=finish, per_step=max(1, request.sampling.seed or 1))


@contextmanager
def parrot(folder: Path, **http: object) -> Iterator[tuple[ApiRig, openai.OpenAI]]:
    files = llama3_like()
    info = make_info(files, max_model_len=4096)
    with ApiRig(folder, script=repeat, info=info, files=files, **http) as rig, rig.openai() as sdk:
        yield rig, sdk


def ask(sdk: openai.OpenAI, text: str, **fields: object) -> ChatCompletion:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "tools": TOOLS,
        "seed": 1,
    }
    return sdk.chat.completions.create(**(body | fields))  # type: ignore[call-overload]


def streamed(sdk: openai.OpenAI, text: str, **fields: object) -> ChatCompletion:
    """The same, put together by the client's own accumulator."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "tools": TOOLS,
        "seed": 1,
    }
    with sdk.chat.completions.stream(**(body | fields)) as stream:  # type: ignore[arg-type]
        return stream.get_final_completion()
