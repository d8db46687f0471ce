"""The process that makes grammars: within its limits, ended when over them, gone at the end."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from cluster.frontend.grammar_jobs import GrammarJob, Limits, Verdict
from cluster.frontend.grammar_process import KEPT_GRAMMARS, GrammarProcess
from cluster.frontend.tokenizer import Tokenizer
from scheduler.errors import InvalidRequest
from scheduler.sampling import SamplingParams
from scheduler.structured import StructuredOutputs
from tests.cluster.frontend.tiny_tokenizers import FAMILIES

TOKENIZER_JSON = FAMILIES["llama3_like"]().tokenizer_json
DIGITS = StructuredOutputs(regex="[0-9]+")
ENDLESS = StructuredOutputs(json={"type": "integer", "multipleOf": 99999989})
"""llguidance builds a state for every remainder."""
TOO_DEEP = StructuredOutputs(
    grammar="start: r0\n" + "\n".join(f'r{i}: "x{i}" r{(i + 1) % 4000}?' for i in range(4000))
)
"""Its recursion ends the process by a signal."""
DEAR = StructuredOutputs(json={"enum": [f"value {i}" for i in range(10_000)]})


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarProcess]:
    process = GrammarProcess(TOKENIZER_JSON, Limits(wall_s=20.0, build_s=10.0))
    yield process
    process.close()


def test_a_form_becomes_a_grammar(grammars: GrammarProcess) -> None:
    assert grammars.grammar_of(DIGITS) == "start: /[0-9]+/"
    assert grammars.grammar_of("start: /a/") == "start: /a/"


def test_a_wrong_form_is_refused_and_the_process_goes_on(grammars: GrammarProcess) -> None:
    """Case 44."""
    grammars.grammar_of(DIGITS)
    before = grammars.pid

    for wanted in (StructuredOutputs(regex="(a"), StructuredOutputs(json="{"), "start: b"):
        with pytest.raises(InvalidRequest, match="cannot be followed"):
            grammars.grammar_of(wanted)

    assert grammars.grammar_of(StructuredOutputs(choice=["a"]))
    assert grammars.pid == before


def test_threads_ask_one_after_the_other(grammars: GrammarProcess) -> None:
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = grammars.grammar_of(StructuredOutputs(regex=f"a{{{number}}}"))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == {number: f"start: /a{{{number}}}/" for number in range(1, 9)}


def test_the_last_grammars_are_kept(no_leaks: None) -> None:
    process = GrammarProcess(TOKENIZER_JSON)
    for number in range(KEPT_GRAMMARS + 1):
        process.grammar_of(StructuredOutputs(regex=f"a{{{number + 1}}}"))
    process.close()

    assert process.grammar_of(StructuredOutputs(regex="a{2}"))
    assert process.pid is None, "a grammar that was kept needs no process"
    process.grammar_of(StructuredOutputs(regex="a{1}"))
    assert process.pid is not None
    process.close()


@pytest.mark.parametrize(
    ("wanted", "limits", "said"),
    [
        (ENDLESS, Limits(wall_s=0.5), "within 0.5 s"),
        (DEAR, Limits(wall_s=60.0, build_s=0.02), "over 0.02 s to build"),
        (TOO_DEEP, Limits(wall_s=60.0), "over 512 MiB"),
    ],
    ids=["endless", "dear", "too_deep"],
)
def test_a_hostile_grammar_is_refused_within_the_limits(
    no_leaks: None, wanted: StructuredOutputs, limits: Limits, said: str
) -> None:
    """Case 49. What cannot be interrupted, and what breaks the library, ends with its process."""
    process = GrammarProcess(TOKENIZER_JSON, limits)
    process.grammar_of(DIGITS)

    with pytest.raises(InvalidRequest, match=said) as refused:
        process.grammar_of(wanted)

    assert refused.value.param == f"structured_outputs.{wanted.kind}"
    assert process.grammar_of(StructuredOutputs(regex="[a-f]+"))
    process.close()


def test_a_process_that_was_killed_is_started_again(no_leaks: None) -> None:
    process = GrammarProcess(TOKENIZER_JSON)
    process.grammar_of(DIGITS)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert process.grammar_of(StructuredOutputs(regex="[a-f]+"))
    process.close()


def test_a_process_that_does_not_start_is_said_to_be() -> None:
    process = GrammarProcess(TOKENIZER_JSON, command=(sys.executable, "-c", "raise SystemExit(3)"))

    with pytest.raises(RuntimeError, match="did not start"):
        process.grammar_of(DIGITS)


def test_a_tokenizer_that_is_not_known_is_the_callers_to_hear() -> None:
    process = GrammarProcess(FAMILIES["unigram"]().tokenizer_json)

    for wanted in (DIGITS, StructuredOutputs(choice=["a"])):
        with pytest.raises(InvalidRequest, match="cannot use the model's tokenizer"):
            process.grammar_of(wanted)
    process.close()


def test_the_process_ends_with_its_owner(no_leaks: None) -> None:
    """It is dropped, closed, or its process ends in whatever way."""
    tokenizer = Tokenizer(FAMILIES["llama3_like"]())
    assert tokenizer.grammar(SamplingParams()) is None
    assert tokenizer.grammar(SamplingParams(structured_outputs=DIGITS)) == "start: /[0-9]+/"
    tokenizer.close()
    assert tokenizer.grammar(SamplingParams(grammar="start: /b/")) == "start: /b/"
    del tokenizer

    code = (
        "import os\n"
        "from tests.cluster.frontend.test_grammar_process import *\n"
        "process = GrammarProcess(TOKENIZER_JSON)\n"
        "process.grammar_of(DIGITS)\n"
        "print(process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    with_it = int(found.stdout)
    psutil.wait_procs([psutil.Process(with_it)] if psutil.pid_exists(with_it) else [], timeout=30)
    assert not psutil.pid_exists(with_it)


def test_a_job_knows_which_field_it_is_about() -> None:
    assert GrammarJob(wanted=DIGITS).param == "structured_outputs.regex"
    assert GrammarJob(grammar="start: /a/").param == "grammar"
    assert Verdict().grammar is None
