"""Prompts and running streams share steps: issue 2, statement 4; case 76."""

from collections.abc import Callable

import pytest

from cluster.frontend.tokenizer import Tokenizer
from scheduler.journal import Planned
from scheduler.sampling import SamplingParams
from tests.system.in_process import Answer, InProcessCluster, LoadedRanks
from tests.system.oracle import Oracle
from tests.system.prompts import passage

pytestmark = pytest.mark.model

NUM_STREAMS = 6
BUDGET = 32
LONG, SHORT = 200, 12


class Scene:
    """Streams run; then a long prompt arrives, and a step later a short one."""

    def __init__(self, ranks: LoadedRanks, tokenizer: Tokenizer, plans: int) -> None:
        self.cluster = InProcessCluster(
            ranks, num_blocks=128, max_num_batched_tokens=BUDGET, plans_in_flight=plans
        )
        self.streams = [
            self._submit(passage(tokenizer, 5, start=100 * at), 40) for at in range(NUM_STREAMS)
        ]
        while not all(stream.tokens for stream in self.streams):
            self.cluster.step()
        self.before = self.cluster.num_steps + plans  # what is planned already
        self.long = self._submit(passage(tokenizer, LONG, start=1000), 3)
        self.cluster.step()
        self.short = self._submit(passage(tokenizer, SHORT, start=1500), 3)
        while not self.long.tokens:
            self.cluster.step()
        self.after = self.cluster.num_steps
        self.cluster.run()

    def _submit(self, prompt: list[int], most: int) -> Answer:
        asked = SamplingParams(temperature=0.0, seed=0, max_tokens=most, ignore_eos=True)
        return self.cluster.submit(prompt, asked)

    @property
    def meanwhile(self) -> list[Planned]:
        """The journal of the steps in which the long prompt was computed."""
        planned = [one for one in self.cluster.records if isinstance(one, Planned) and one.step]
        return [one for one in planned if self.before < one.step <= self.after]


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.slow), 2],
    ids=["one plan", "two plans"],
)
def scene(
    request: pytest.FixtureRequest, loaded: Callable[[int], LoadedRanks], tokenizer: Tokenizer
) -> Scene:
    return Scene(loaded(2), tokenizer, request.param)


def test_no_running_stream_misses_a_step_while_a_long_prompt_is_computed(scene: Scene) -> None:
    assert scene.after - scene.before >= LONG // BUDGET
    for stream in scene.streams:
        during = [step for step in stream.steps if scene.before < step <= scene.after]
        assert during == list(range(scene.before + 1, scene.after + 1))


def test_steps_hold_both_decodes_and_prompt_tokens(scene: Scene) -> None:
    assert len(scene.meanwhile) >= LONG // BUDGET
    for step in scene.meanwhile:
        assert step.decode_tokens >= NUM_STREAMS
        assert step.prefill_tokens > 0
        assert step.decode_tokens + step.prefill_tokens <= BUDGET


def test_a_short_prompt_that_comes_later_answers_before_the_long_one(scene: Scene) -> None:
    assert scene.short.steps[0] < scene.long.steps[0]


def test_streams_and_prompts_that_shared_steps_say_what_they_should(
    scene: Scene, oracle: Oracle
) -> None:
    answers = [*scene.streams, scene.long, scene.short]
    oracle.prepare(answers)
    for answer in answers:
        oracle.check(answer)
