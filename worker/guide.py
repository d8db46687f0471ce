"""Keeps sequences to their grammars: which tokens may come next, beside the sampler.

A matcher is a function of the grammar and of the output so far, so it is made new wherever a
sequence is admitted (also after preemption or recovery) and fed from the token log: the token
sampled in one step is read there in the next one, and no plan has to wait for it. Matchers are
built, fed and asked in threads, while the model runs.

A sequence ends where its grammar says:

    it may end     end tokens are allowed beside the others, unless `ignore_eos` is set
    it must end    an end token is given, whatever else is asked (`ignore_eos`, `min_tokens`,
                   `allowed_token_ids`, `bad_words`)
    stuck          nothing that is asked for may follow, and it may not end: the sequence fails

Ids of `stop_token_ids` count as end tokens that `ignore_eos` does not switch off.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from scheduler.arrays import Int32Array
from scheduler.plan import Admission
from worker.grammar import GrammarFailed, check, new_matcher

MAX_THREADS = 8
STEP_LIMIT_S = 0.5
"""CPU seconds that one sequence may take of a step, its grammar's building included. More:
costlier grammars pass, and streams beside them stutter for longer."""
LOOK_S = 0.05
"""How often a step that is late looks for whoever is over the limit."""

Words = npt.NDArray[np.int32]
"""[W] one bit per token id, the lowest first"""


@dataclass(slots=True, eq=False)
class _Guided:
    """One sequence and what it follows."""

    grammar: str
    num_fed: int
    """Tokens of the log that the matcher has seen, or that precede its grammar"""
    end_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    ignores_end: bool
    matcher: LLMatcher | None = None
    """Built when the first token is to be sampled."""
    may_end: bool = False
    is_over: bool = False
    """An end token was sampled: a matcher is never fed one."""
    failure: str = ""

    @property
    def is_open(self) -> bool:
        return not self.is_over and not self.failure


class _Question:
    """What may follow in one sequence, after tokens that its matcher has not seen."""

    def __init__(self, slot: int, guided: _Guided, tokens: list[int], num_words: int) -> None:
        self.slot, self.guided, self._tokens = slot, guided, tokens
        self.words: Words = np.zeros(num_words, dtype=np.int32)
        self.failure = ""
        self.may_end = False
        self.is_given_up = False
        self.matcher = guided.matcher
        self._clock: int | None = None
        self._begin_s = 0.0

    def answer(self, tokenizer: LLTokenizer) -> None:
        """Build the matcher if there is none, feed it, and fill in the words."""
        self._begin_s = time.thread_time()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            if self.matcher is None:
                self.matcher = new_matcher(tokenizer, self.guided.grammar)
            if self._tokens and not self.matcher.consume_tokens(self._tokens):
                check(self.matcher)
            self.matcher.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
            check(self.matcher)
        except GrammarFailed as error:
            self.failure = str(error)
            return
        self.may_end = self.matcher.is_stopped() or self.matcher.is_accepting()
        self._set_ends(tokenizer.eos_tokens)

    @property
    def spent_s(self) -> float:
        """CPU seconds that it has taken so far."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock) - self._begin_s

    def give_up(self) -> None:
        """Have the sequence fail. Nothing that a thread still finds out counts."""
        self.is_given_up = True
        self.guided.failure = (
            f"the grammar takes over {STEP_LIMIT_S:g} s for one token; make it smaller or less "
            "ambiguous"
        )

    def settle(self) -> None:
        """Keep what was learned."""
        guided = self.guided
        if self.is_given_up:
            return
        guided.matcher, guided.may_end, guided.failure = self.matcher, self.may_end, self.failure
        guided.num_fed += len(self._tokens)

    def _set_ends(self, own: Sequence[int]) -> None:
        """Make the bits of end tokens those of the request: llguidance guesses from names."""
        _put(self.words, own, is_set=False)
        if self.may_end:
            _put(self.words, self.guided.stop_ids, is_set=True)
            if not self.guided.ignores_end:
                _put(self.words, self.guided.end_ids, is_set=True)


class _Round:
    """The questions of one step, answered by threads that take one after the other."""

    def __init__(self, questions: list[_Question], tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting = deque(questions)
        self._asked: list[_Question] = []
        self._lock = threading.Lock()
        self._open = set(questions)
        self._is_done = threading.Event()

    def work(self) -> None:
        """Answer what waits; for any number of threads."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                question = self._waiting.popleft()
                self._asked.append(question)
            try:
                question.answer(self._tokenizer)
            except BaseException as error:  # a panic of the library is none of `Exception`
                question.failure = f"the grammar cannot be followed: {error!r:.200}"
            self._close(question)

    def wait(self) -> bool:
        """Wait for the answers; False if one more thread is needed, for one is given up.

        A sequence over the limit fails; the thread that is busy with it cannot be stopped.
        """
        while not self._is_done.wait(LOOK_S):
            with self._lock:
                late = [one for one in self._asked if one in self._open]
            for question in late:
                if question.spent_s > STEP_LIMIT_S:
                    question.give_up()
                    self._close(question)
                    return False
        return True

    def settled(self) -> list[_Question]:
        """Questions of sequences that go on, in the order in which they were taken."""
        for question in self._asked:
            question.settle()
        return [question for question in self._asked if question.guided.is_open]

    def _close(self, question: _Question) -> None:
        with self._lock:
            self._open.discard(question)
            if not self._open:
                self._is_done.set()


class Guide:
    """The matchers of the slots whose sequences follow a grammar.

    Args:
        read_tokenizer: reads the model's vocabulary, once, when the first grammar comes.
        vocab_size: columns of the logits.
    """

    def __init__(self, read_tokenizer: Callable[[], LLTokenizer], vocab_size: int) -> None:
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._guided: dict[int, _Guided] = {}
        self._num_threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
        self._pool: ThreadPoolExecutor | None = None
        self._tokenizer: LLTokenizer | None = None
        self._round: _Round | None = None
        self._found: dict[int, Words] | None = None
        """What may follow, by slot; None while the round is not waited for."""

    @property
    def num_guided(self) -> int:
        return len(self._guided)

    def admit(self, admission: Admission) -> None:
        """Take over what the sequence that now has the slot must follow."""
        asked = admission.sampling
        assert asked.grammar is not None, f"slot {admission.slot} follows no grammar"
        guided = self._guided[admission.slot] = _Guided(
            grammar=asked.grammar,
            num_fed=admission.num_prompt,
            end_ids=admission.end_ids,
            stop_ids=tuple(asked.stop_token_ids),
            ignores_end=asked.ignore_eos,
        )
        if self._tokenizer is None:
            try:
                self._tokenizer = self._read_tokenizer()
            except (GrammarFailed, OSError) as error:
                guided.failure = str(error)

    def release(self, slot: int) -> None:
        """Forget the sequence that had the slot, if it was guided."""
        self._guided.pop(slot, None)

    def prepare(self, slots: Int32Array, positions: Int32Array, history: Int32Array) -> None:
        """Begin to find what may stand at the positions; arguments as of `Sampler.sample`."""
        self._round = self._found = None
        if not self._guided or self._tokenizer is None:
            return
        num_words = (self._tokenizer.vocab_size + 31) // 32
        questions = []
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            guided = self._guided.get(slot)
            if guided is None or not guided.is_open:
                continue
            tokens = history[slot, guided.num_fed : position].tolist()
            if not set(tokens).isdisjoint((*guided.end_ids, *guided.stop_ids)):
                guided.is_over = True
                continue
            questions.append(_Question(slot, guided, tokens, num_words))
        if questions:
            self._round = _Round(questions, self._tokenizer)
            self._begin(self._round, len(questions))

    def mask(self, logits: Tensor, slots: Sequence[int]) -> None:
        """Ban what the grammars do not allow, in place; rows of other sequences stay.

        A step's rows may come in several pieces.

        Shapes:
            logits: [R, V]
            slots: [R]
        """
        if self._round is None:
            return
        if self._found is None:
            self._found = self._answers(self._round)
        found = self._found
        guided = [row for row, slot in enumerate(slots) if slot in found]
        if not guided:
            return
        words = np.stack([found[slots[row]] for row in guided])
        allowed = allowed_ids(words, self._vocab_size, logits.device)
        rows = torch.tensor(guided, device=logits.device)
        logits[rows] = torch.where(allowed, logits[rows], -torch.inf)

    def _answers(self, step: _Round) -> dict[int, Words]:
        """By slot, of sequences that go on."""
        while not step.wait():
            self.close()  # threads that are not stuck go on with what waits
            self._begin(step)
        return {question.slot: question.words for question in step.settled()}

    def end_of(self, slot: int, logits: Tensor) -> int:
        """The token of a guided sequence that nothing else may follow: its likeliest end token.

        If it may not end, it has failed, and the token means nothing.

        Args:
            logits: [V] as the model gave them
        """
        guided = self._guided[slot]
        if not guided.is_open:
            return 0
        ends = [i for i in guided.end_ids or guided.stop_ids if i < self._vocab_size]
        if guided.may_end and ends:
            return ends[int(logits[ends].argmax())]
        guided.failure = (
            "the grammar is complete, but the request has no end token"
            if guided.may_end
            else "allowed_token_ids, bad_words and logit_bias leave no token that the grammar "
            "allows here; ask for less of them, or for another grammar"
        )
        return 0

    def failures(self, slots: Sequence[int]) -> dict[int, str]:
        """Why sequences cannot go on, by row of `slots`."""
        if not self._guided:
            return {}
        found = ((row, self._guided.get(slot)) for row, slot in enumerate(slots))
        return {row: guided.failure for row, guided in found if guided and guided.failure}

    def close(self) -> None:
        """Let the threads end when they have nothing to do."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _begin(self, step: _Round, num_questions: int = 1) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="stoker-guide")
        for _ in range(min(num_questions, self._num_threads)):
            self._pool.submit(step.work)


def allowed_ids(words: Words, vocab_size: int, device: torch.device) -> Tensor:
    """[G, V] bool from [G, W] words; ids without a bit are not allowed."""
    allowed = unpacked_here(words) if device.type == "cpu" else unpacked_there(words, device)
    missing = vocab_size - allowed.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(allowed, (0, missing), value=False)
    return allowed[:, :vocab_size]


def unpacked_here(words: Words) -> Tensor:
    """[G, 32 * W] bool: bits as numpy unpacks them, a tenth of torch's time."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def unpacked_there(words: Words, device: torch.device) -> Tensor:
    """The same, on a device to which bits travel faster than bytes."""
    packed = torch.from_numpy(words.view(np.uint8)).to(device)
    bits = torch.arange(8, dtype=torch.uint8, device=device)
    return ((packed[:, :, None] >> bits) & 1).bool().view(len(words), -1)


def _put(words: Words, ids: Sequence[int], *, is_set: bool) -> None:
    unsigned = words.view(np.uint32)
    for token in ids:
        place, bit = token // 32, np.uint32(1 << (token % 32))
        if token < 0 or place >= len(words):
            continue
        unsigned[place] = unsigned[place] | bit if is_set else unsigned[place] & ~bit
