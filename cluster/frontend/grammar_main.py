"""The main of the process that checks grammars: `python -m cluster.frontend.grammar_main`.

It reads jobs from standard input and answers each on standard output, one after the other, and
ends when the input does. It may be ended at any time: nothing is kept here.
"""

import os
import resource
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from cluster.frontend.grammar import check_grammar, compile_grammar
from cluster.frontend.grammar_jobs import GrammarJob, Limits, Verdict, frame_of, read_frame
from scheduler.errors import InvalidRequest
from worker.grammar import GrammarFailed, read_tokenizer

STACK_BYTES = 2 * 2**20
"""Less than the threads have in which workers follow a grammar: what is too deep fails here."""


PRIORITY = 5
"""Below that of the processes that make tokens, which may have the same cores."""


def main() -> int:
    os.nice(PRIORITY)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()
    return 0


def _answer(source: BinaryIO, target: BinaryIO) -> None:
    frame = read_frame(source)
    if frame is None:
        return
    limits = msgspec.msgpack.decode(frame, type=Limits)
    try:
        tokenizer = read_tokenizer((read_frame(source) or b"").decode())
    except GrammarFailed as error:
        reason = str(error)
        _write(target, Verdict())
        _serve(source, target, lambda job: Verdict(error=reason, param=job.param))
        return
    _write(target, Verdict())
    _limit_memory(limits.memory_bytes)

    def judge(job: GrammarJob) -> Verdict:
        _limit_cpu(limits.wall_s)
        try:
            if job.wanted is not None:
                found = compile_grammar(job.wanted, tokenizer)
            else:
                found = check_grammar(job.grammar, tokenizer)
        except InvalidRequest as error:
            return Verdict(error=str(error), param=error.param)
        except MemoryError:
            return Verdict(error=limits.too_large, param=job.param)
        if found.build_s > limits.build_s:
            return Verdict(error=limits.too_slow, param=job.param)
        return Verdict(grammar=found.grammar)

    _serve(source, target, judge)


def _serve(source: BinaryIO, target: BinaryIO, judge: Callable[[GrammarJob], Verdict]) -> None:
    while (frame := read_frame(source)) is not None:
        verdict = judge(msgspec.msgpack.decode(frame, type=GrammarJob))
        _write(target, verdict)


def _write(target: BinaryIO, verdict: Verdict) -> None:
    target.write(frame_of(msgspec.msgpack.encode(verdict)))
    target.flush()


def _limit_memory(more_bytes: int) -> None:
    """Let the process grow by so much; an allocation beyond that fails, or ends it."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, resource.RLIM_INFINITY))


def _limit_cpu(more_s: float) -> None:
    """End by itself some time after whoever waits has given up, even if it is gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + more_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    raise SystemExit(main())
