"""Makes grammars of what callers want, in a process that can be ended.

A schema or an expression of a few letters may take minutes and gigabytes to understand, and the
library that does it cannot be interrupted. So it runs in a child, started with the first guided
request, which is ended when a grammar takes too long, and which cannot grow without bound.
Whoever asks waits in a thread of its own; event loops and running streams are not concerned.
"""

import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict

import msgspec

from cluster.frontend.grammar_jobs import (
    GrammarJob,
    Limits,
    Verdict,
    frame_of,
    length_of,
)
from scheduler.errors import InvalidRequest
from scheduler.structured import StructuredOutputs

START_LIMIT_S = 60.0
"""Until the child has read the tokenizer, on a machine that is busy with other things."""
KEPT_GRAMMARS = 32

COMMAND = (sys.executable, "-P", "-m", "cluster.frontend.grammar_main")


class GrammarProcess:
    """The child, and the grammars that it made last. Any thread may ask; one waits for another.

    Args:
        tokenizer_json: of the model that will follow the grammars.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        limits: Limits | None = None,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        self.limits = Limits() if limits is None else limits
        self._tokenizer_json = tokenizer_json
        self._command = command
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._kept: OrderedDict[StructuredOutputs | str, str] = OrderedDict()

    @property
    def pid(self) -> int | None:
        """Of the child, if there is one."""
        child = self._child
        return None if child is None else child.pid

    def grammar_of(self, wanted: StructuredOutputs | str) -> str:
        """The grammar of a form, or of a grammar itself: what a worker can follow.

        Raises:
            InvalidRequest: it is wrong, not supported, or over a limit; `param` says where.
        """
        with self._lock:
            if wanted in self._kept:
                self._kept.move_to_end(wanted)
                return self._kept[wanted]
            grammar = self._ask(_job(wanted))
            self._kept[wanted] = grammar
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            return grammar

    def close(self) -> None:
        """End the child. The next request starts another one."""
        with self._lock:
            self._end()

    def _ask(self, job: GrammarJob) -> str:
        if self._child is not None and not self._child.is_alive:
            self._end()
        if self._child is None:
            self._child = _Child(self._command, self.limits, self._tokenizer_json)
        try:
            verdict = self._child.ask(job, self.limits.wall_s)
        except TimeoutError:
            self._end()
            raise InvalidRequest(self.limits.too_long, param=job.param) from None
        except OSError:
            self._end()
            raise InvalidRequest(self.limits.too_large, param=job.param) from None
        if verdict.grammar is None:
            raise InvalidRequest(verdict.error, param=verdict.param)
        return verdict.grammar

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def _job(wanted: StructuredOutputs | str) -> GrammarJob:
    if isinstance(wanted, str):
        return GrammarJob(grammar=wanted)
    return GrammarJob(wanted=wanted)


class _Child:
    """One child process that has read the tokenizer.

    Raises:
        OSError, TimeoutError: it did not start.
    """

    def __init__(self, command: tuple[str, ...], limits: Limits, tokenizer_json: bytes) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # whatever a hostile grammar makes the library say
            process_group=0,  # Ctrl-C in a terminal is for others
        )
        # Also for an owner that is dropped, and at the interpreter's end.
        self.end = weakref.finalize(self, _end_process, self._process)
        self.pid = self._process.pid
        try:
            self._write(msgspec.msgpack.encode(limits), START_LIMIT_S)
            self._write(tokenizer_json, START_LIMIT_S)
            self._read(START_LIMIT_S)
        except OSError as error:
            self.end()
            raise RuntimeError(
                f"the process that checks grammars did not start within {START_LIMIT_S:g} s "
                f"({error}); run {' '.join(command)} to see why"
            ) from error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, job: GrammarJob, limit_s: float) -> Verdict:
        """Its answer.

        Raises:
            TimeoutError: there was none in time.
            ConnectionError: it has ended.
        """
        self._write(msgspec.msgpack.encode(job), limit_s)
        return msgspec.msgpack.decode(self._read(limit_s), type=Verdict)

    def _write(self, content: bytes, limit_s: float) -> None:
        assert self._process.stdin is not None
        pipe, left = self._process.stdin.fileno(), memoryview(frame_of(content))
        os.set_blocking(pipe, False)
        deadline = time.monotonic() + limit_s
        while left:
            _wait(pipe, select.POLLOUT, deadline)
            left = left[os.write(pipe, left) :]

    def _read(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe, found = self._process.stdout.fileno(), b""
        deadline = time.monotonic() + limit_s
        while (missing := length_of(found) - len(found)) > 0:
            _wait(pipe, select.POLLIN, deadline)
            piece = os.read(pipe, missing)
            if not piece:
                raise ConnectionError("it has ended")
            found += piece
        return found[length_of(b"") :]


def _wait(pipe: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _end_process(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
