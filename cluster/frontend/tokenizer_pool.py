"""Threads that encode, so that the event loop does not wait for it.

Each thread has a `Tokenizer` of its own: nothing is shared that one of them could change
under another. The tokenizers library encodes without Python's lock; templates need it, but
are short.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.frontend.grammar_process import GrammarProcess
from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_files import TokenizerFiles

LONG_CHARS = 20_000
"""From this many characters on, a text counts as long: tens of milliseconds to encode."""

T = TypeVar("T")


class TokenizerPool:
    """Runs work with a tokenizer, off the loop. Work starts in the order in which it came,
    except that long texts leave a thread to the short ones that come after them."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self.num_jobs = 0
        """Pieces of work that somebody waits for."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="stoker-encode")
        self._own = threading.local()
        self._files: TokenizerFiles | None = None
        self._grammars: GrammarProcess | None = None  # of those files, for all threads
        self._long_turns = asyncio.Semaphore(max(1, num_threads - 1))

    @property
    def is_loaded(self) -> bool:
        """Whether there are files to make tokenizers from."""
        return self._files is not None

    def set_files(self, files: TokenizerFiles) -> None:
        """Use this model from the next work on; threads make their tokenizers meanwhile."""
        self._files, self._grammars = files, GrammarProcess(files.tokenizer_json)
        for _ in range(self.num_threads):
            self._executor.submit(self._tokenizer, files)

    async def run(self, work: Callable[[Tokenizer], T], *, num_chars: int = 0) -> T:
        """What `work` returns or raises, from a thread that has its own tokenizer.

        If the caller is cancelled, work that has begun goes on, for nobody.

        Args:
            num_chars: of the text to encode, as far as known; from `LONG_CHARS` on, it waits
                for its turn among the long ones.
        """
        self.num_jobs += 1
        try:
            if num_chars < LONG_CHARS:
                return await self._run(work)
            async with self._long_turns:
                return await self._run(work)
        finally:
            self.num_jobs -= 1

    async def _run(self, work: Callable[[Tokenizer], T]) -> T:
        files = self._files
        assert files is not None, "work before set_files"

        def job() -> T:
            return work(self._tokenizer(files))

        return await asyncio.get_running_loop().run_in_executor(self._executor, job)

    def _tokenizer(self, files: TokenizerFiles) -> Tokenizer:
        """That of the thread that calls."""
        own: Tokenizer | None = getattr(self._own, "tokenizer", None)
        if own is None or own.files is not files:
            own = self._own.tokenizer = Tokenizer(files, self._grammars)
            # What it makes when first needed holds Python's lock for long: have it made now.
            own.encode("", parse_control_tokens=False)
        return own

    def close(self) -> None:
        """Drop work that has not begun, and end the threads when they are done."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._grammars = None
