"""Many calls at once: each gets its own answer, whatever becomes of the others."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from cluster.messages.sockets import ToClient
from scheduler.request import Finish, Request
from tests.cluster.api.rig import ApiRig, spoken
from tests.cluster.frontend.fake_engine import make_info


def repeat(request: Request) -> list[ToClient]:
    """Say the prompt again, but for its begin token. A call that bans token 5 hears nothing."""
    if request.sampling.logit_bias:
        return []
    return spoken(request, request.prompt.tolist()[1:], finish=Finish.LENGTH)


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiRig]:
    info = make_info(max_model_len=4096)
    folder: Path = tmp_path_factory.mktemp("repeating")
    with ApiRig(folder, script=repeat, info=info, encode_threads=4) as rig:
        yield rig


def marker(number: int) -> str:
    return f"call number {number} of them 👩‍👩‍👧‍👦"


async def check_each_hears_itself(rig: ApiRig, num_calls: int) -> None:
    """A quarter streams, a quarter chats, a quarter waits for nothing and is cut off."""

    async def ask(number: int) -> str | None:
        prompt = {"model": "tiny", "prompt": marker(number), "max_tokens": 200}
        match number % 4:
            case 0:
                return (await client.completions.create(**prompt)).choices[0].text  # type: ignore[call-overload, no-any-return]
            case 1:
                stream = await client.completions.create(**prompt, stream=True)  # type: ignore[call-overload]
                return "".join([chunk.choices[0].text async for chunk in stream])
            case 2:
                both = [marker(number), marker(number + num_calls)]
                answer = await client.completions.create(**prompt | {"prompt": both})  # type: ignore[call-overload]
                assert answer.choices[1].text == both[1]
                return answer.choices[0].text  # type: ignore[no-any-return]
            case _:
                with pytest.raises((TimeoutError, openai.APITimeoutError)):
                    async with asyncio.timeout(0.2):
                        await client.completions.create(**prompt, logit_bias={"5": -1})  # type: ignore[call-overload]
                return None

    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="any", max_retries=0) as client:
        heard = await asyncio.gather(*map(ask, range(num_calls)))
    assert heard == [marker(i) if i % 4 < 3 else None for i in range(num_calls)]


def test_each_of_64_calls_gets_its_own_answer_while_others_leave(repeating: ApiRig) -> None:
    asyncio.run(check_each_hears_itself(repeating, 64))
    assert repeating.http.get("/version").status_code == 200
    assert repeating.api.calls == {}


@pytest.mark.slow
def test_mixed_calls_from_many_connections_never_fail(repeating: ApiRig) -> None:
    """Texts are encoded in several threads at once, for prompts, bad words, chats and counts."""
    chat = {"messages": [{"role": "user", "content": marker(7)}]}
    calls: list[tuple[str, dict[str, object]]] = [
        ("/completions", {"prompt": marker(1), "bad_words": ["fox", "dog"]}),
        ("/completions", {"prompt": marker(2) * 5, "truncate_prompt_tokens": 8}),
        ("/completions", {"prompt": "a", "stop": ["fox", "dog"]}),
        ("/chat/completions", chat),
    ]

    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{repeating.url}/v1", api_key="any", max_retries=0
        ) as client:

            async def many(first: int) -> None:
                for i in range(40):
                    path, body = calls[(first + i) % len(calls)]
                    await client.post(path, body=body, cast_to=object)

            await asyncio.gather(*map(many, range(50)))

    asyncio.run(run())
    assert repeating.api.calls == {}
