"""Encoding off the loop: the same ids as ever, and a loop that goes on."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_pool import LONG_CHARS, TokenizerPool
from scheduler.errors import InvalidRequest
from tests.cluster.frontend.tiny_tokenizers import FAMILIES, llama3_like, make_tokenizer

MESSAGES = [{"role": "user", "content": "where is <|im_end|> the fox?"}]


def play(scene: Callable[[TokenizerPool], Awaitable[None]], num_threads: int = 2) -> None:
    async def run() -> None:
        pool = TokenizerPool(num_threads)
        pool.set_files(llama3_like())
        try:
            async with asyncio.timeout(60):
                await scene(pool)
        finally:
            pool.close()

    asyncio.run(run())


def test_each_thread_has_a_tokenizer_of_its_own() -> None:
    async def scene(pool: TokenizerPool) -> None:
        together = threading.Barrier(3)

        def meet(tokenizer: Tokenizer) -> tuple[int, int]:
            together.wait(30)
            return threading.get_ident(), id(tokenizer)

        first = await asyncio.gather(*(pool.run(meet) for _ in range(3)))
        second = await asyncio.gather(*(pool.run(meet) for _ in range(3)))
        assert len(dict(first)) == len({tokenizer for _, tokenizer in first}) == 3
        assert sorted(first) == sorted(second)

    play(scene, num_threads=3)


def test_new_files_hold_for_the_next_work() -> None:
    async def scene(pool: TokenizerPool) -> None:
        other = make_tokenizer("llama2_like").files
        assert await pool.run(lambda tokenizer: tokenizer.files) == llama3_like()
        pool.set_files(other)
        assert await pool.run(lambda tokenizer: tokenizer.files) is other

    play(scene, num_threads=1)


def test_errors_of_the_work_reach_who_asked() -> None:
    async def scene(pool: TokenizerPool) -> None:
        with pytest.raises(InvalidRequest, match="surrogate"):
            await pool.run(lambda tokenizer: tokenizer.encode("\ud800"))
        assert await pool.run(lambda tokenizer: tokenizer.encode("fox"))

    play(scene)


def test_many_callers_with_mixed_work_get_what_a_lone_tokenizer_gives() -> None:
    """Case 71: a shared tokenizer fails with "Already borrowed", or mixes calls up."""
    long = "the quick brown fox " * 150
    works: list[Callable[[Tokenizer], object]] = [
        lambda tokenizer: tokenizer.encode("hello there"),
        lambda tokenizer: tokenizer.encode(long),
        lambda tokenizer: tokenizer.bad_word_ids(["fox", "quick"]),
        lambda tokenizer: tokenizer.encode_chat(MESSAGES),
        lambda tokenizer: tokenizer.encode_chat(MESSAGES, parse_control_tokens=True),
        lambda tokenizer: tokenizer.decode(tokenizer.encode("a lazy dog")),
    ]
    alone = Tokenizer(llama3_like())
    wanted = [work(alone) for work in works]

    async def scene(pool: TokenizerPool) -> None:
        async def caller(first: int) -> None:
            for i in range(first, first + 60):
                at = i % len(works)
                assert await pool.run(works[at]) == wanted[at]

        await asyncio.gather(*map(caller, range(50)))

    play(scene, num_threads=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_text_has_the_ids_of_the_library(family: str) -> None:
    tokenizer = make_tokenizer(family)
    long = "the quick brown fox jumps over the lazy dog, 早上好 🦊! " * 60
    for around in (True, False):
        wanted = tokenizer._raw.encode(long, add_special_tokens=around).ids
        assert tokenizer.encode(long, add_special_tokens=around) == wanted
        as_text = tokenizer.encode(long, add_special_tokens=around, parse_control_tokens=False)
        assert as_text == wanted


@pytest.mark.parametrize("parses", [True, False])
def test_a_long_prompt_does_not_hold_up_the_loop(parses: bool) -> None:
    """Case 130, for one prompt: while a thread encodes it, the loop turns as it likes."""
    text = "the quick brown fox jumps over the lazy dog " * 10_000

    async def scene(pool: TokenizerPool) -> None:
        def encode(tokenizer: Tokenizer) -> list[int]:
            return tokenizer.encode(text, parse_control_tokens=parses)

        await pool.run(lambda tokenizer: tokenizer.encode("", parse_control_tokens=False))
        work = asyncio.ensure_future(pool.run(encode, num_chars=len(text)))
        num_turns = 0
        while not work.done():
            await asyncio.sleep(0.0005)
            num_turns += 1
        assert len(await work) > 10_000
        assert num_turns > 20

    play(scene, num_threads=1)


def test_short_texts_overtake_long_ones() -> None:
    async def scene(pool: TokenizerPool) -> None:
        may_end = threading.Event()

        def hold(_: Tokenizer) -> None:
            assert may_end.wait(30)

        held = [asyncio.ensure_future(pool.run(hold, num_chars=LONG_CHARS)) for _ in range(5)]
        await asyncio.sleep(0)
        assert await pool.run(lambda tokenizer: tokenizer.encode("short"))
        may_end.set()
        await asyncio.gather(*held)

    play(scene)


def test_a_caller_that_leaves_costs_no_thread() -> None:
    async def scene(pool: TokenizerPool) -> None:
        may_end = threading.Event()
        held = asyncio.ensure_future(pool.run(lambda _: may_end.wait(30), num_chars=LONG_CHARS))
        waiting = asyncio.ensure_future(pool.run(lambda _: 1, num_chars=LONG_CHARS))
        await asyncio.sleep(0)
        for task in (waiting, held):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        may_end.set()
        assert await pool.run(lambda _: 2, num_chars=LONG_CHARS) == 2

    play(scene, num_threads=1)


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        TokenizerPool(0)
