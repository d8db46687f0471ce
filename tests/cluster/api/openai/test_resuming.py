"""A reader who left after any event goes on with an answer that was computed again."""

import random
from collections.abc import Callable, Sequence

import pytest

from cluster.api.calls import Call
from cluster.api.errors import ApiError
from cluster.api.openai.chat_answer import ChatAnswer
from cluster.api.openai.chat_body import ChatBody
from cluster.api.openai.completion_answer import CompletionAnswer
from cluster.api.openai.completion_body import CompletionBody
from cluster.api.openai.generation import Answer
from cluster.api.openai.generation_body import StreamOptions
from cluster.api.openai.responses_answer import ResponsesAnswer
from cluster.api.openai.responses_body import ResponsesBody
from cluster.api.openai.tools.use import Function, ToolChoice, ToolUse, tool_use_of
from cluster.api.position import Position
from cluster.frontend.tokenizer import Tokenizer
from scheduler.request import Finish
from scheduler.sampling import SamplingParams
from tests.cluster.api.local_engine import LocalEngine
from tests.cluster.api.openai.streamed import Received, joined, received
from tests.cluster.frontend.tiny_tokenizers import CHATML, make_tokenizer

CREATED = 1_700_000_000
PLAIN = " the quick brown fox 👨‍👩‍👧 jumps über the lazy dog"
CALLS = (
    'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Kraków"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> <tool_cal and no more'
)
STOPPED = "one two thr four three more"

MakeAnswer = Callable[[Call], Answer]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer("llama3_like")


def tools() -> ToolUse:
    found = tool_use_of(
        [Function(name="weather"), Function(name="now")],
        ToolChoice(),
        parser="auto",
        templates={"default": CHATML},
    )
    assert found is not None
    return found


USAGE = StreamOptions(include_usage=True)


def chat(use: ToolUse | None = None, **fields: object) -> MakeAnswer:
    body = ChatBody(messages=[], stream_options=USAGE, **fields)  # type: ignore[arg-type]
    return lambda call: ChatAnswer(
        call, body, created=CREATED, model="tiny", tool_use=use, is_resumable=True
    )


def completions(**fields: object) -> MakeAnswer:
    body = CompletionBody(prompt="hi", stream_options=USAGE, **fields)  # type: ignore[arg-type]
    return lambda call: CompletionAnswer(
        call, body, created=CREATED, model="tiny", is_resumable=True
    )


def responses(use: ToolUse | None = None, **fields: object) -> MakeAnswer:
    body = ResponsesBody(input="hi", **fields)  # type: ignore[arg-type]
    return lambda call: ResponsesAnswer(
        call, body, created=CREATED, model="tiny", tool_use=use, is_resumable=True
    )


LOGPROBS = {"logprobs": 1}
CASES: dict[str, tuple[MakeAnswer, str, dict[str, object]]] = {
    "chat": (chat(), PLAIN, {}),
    "chat with log-probabilities": (chat(logprobs=True, top_logprobs=1), PLAIN, LOGPROBS),
    "chat with ids": (chat(return_token_ids=True), PLAIN, {}),
    "chat with tools": (chat(tools()), CALLS, {}),
    "chat that is stopped": (chat(), STOPPED, {"stop": ["three", "two three four"]}),
    "three chats": (chat(tools(), n=3), CALLS, {"n": 3}),
    "completions": (completions(), PLAIN, {}),
    "completions with echo": (completions(echo=True, logprobs=1), PLAIN, LOGPROBS),
    "three completions": (completions(n=3), STOPPED, {"n": 3, "stop": ["three"]}),
    "responses": (responses(), PLAIN, {}),
    "responses with tools": (responses(tools()), CALLS, {}),
    "responses with log-probabilities": (
        responses(include=["message.output_text.logprobs"], top_logprobs=1),
        PLAIN,
        LOGPROBS,
    ),
}


class Spoken:
    """One computation of an answer, which is read at random moments."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        make: MakeAnswer,
        said: str,
        sampling: dict[str, object],
        chance: random.Random,
    ) -> None:
        self._engine = LocalEngine(tokenizer)
        wanted = {"max_tokens": 1000, **sampling}
        if "echo" not in wanted and wanted.get("logprobs") is not None:
            wanted["prompt_logprobs"] = wanted["logprobs"]
        self.call = self._engine.call(SamplingParams(**wanted))  # type: ignore[arg-type]
        self.answer = make(self.call)
        self._chance = chance
        self._left = [
            tokenizer.encode(said[index:], add_special_tokens=False)
            for index in range(len(self.call.outputs))
        ]
        self._said = list(map(len, self._left))

    def speak(self, most: int) -> None:
        """Some tokens of each output that still speaks."""
        for index, (request, ids) in enumerate(zip(self._engine.sent, self._left, strict=True)):
            count = self._chance.randint(0, most)
            if not ids or not count or not self.call.outputs[index].is_live:
                continue
            num_before = self._said[index] - len(ids)
            part = ids[:count]
            del ids[:count]
            finish = Finish.NOT_YET if ids else Finish.LENGTH
            self._engine.speak(request, part, num_before, finish)

    def reach(self, position: Position) -> None:
        for output, place in zip(self.call.outputs, position.reached, strict=True):
            while (
                place is not None
                and output.is_live
                and (place.has_ended or len(output.token_ids) < place.num_tokens)
            ):
                self.speak(2)

    def rest(self) -> bytes:
        """Everything from here on."""
        body = self.answer.growth()
        while not self.call.is_done:
            self.speak(4)
            body += self.answer.growth()
        return body + self.answer.growth() + self.answer.closing()


def resumed(spoken: Spoken, event_id: str) -> list[Received]:
    position = Position.parse(event_id)
    spoken.reach(position)
    for _ in range(2):
        spoken.speak(3)  # it may be further than its reader was
    spoken.answer.skip(position)
    return received(spoken.rest())


@pytest.mark.parametrize("name", CASES)
def test_after_any_event_the_rest_follows_once(tokenizer: Tokenizer, name: str) -> None:
    make, said, sampling = CASES[name]
    chance = random.Random(name)

    def again() -> Spoken:
        return Spoken(tokenizer, make, said, sampling, chance)

    undisturbed = received(again().rest())
    places = range(1, len(undisturbed))
    for left_after in chance.sample(places, min(8, len(places))):
        first = undisturbed[:left_after]
        if first[-1].data is None:
            continue
        events = [*first, *resumed(again(), first[-1].event_id)]
        assert _without_counts(events) == _without_counts(undisturbed)


def _without_counts(events: Sequence[Received]) -> dict[str, object]:
    """How many events there are depends on how tokens came together."""
    parts = joined(events).parts
    return {name: part for name, part in parts.items() if name != "events"}


@pytest.mark.parametrize("name", CASES)
def test_a_reader_may_leave_again_and_again(tokenizer: Tokenizer, name: str) -> None:
    make, said, sampling = CASES[name]
    chance = random.Random(name + "again")
    undisturbed = received(Spoken(tokenizer, make, said, sampling, chance).rest())

    events: list[Received] = []
    more = received(Spoken(tokenizer, make, said, sampling, chance).rest())
    while True:
        taken = more[: chance.randint(1, 3)]
        events += taken
        if len(taken) == len(more) or not taken[-1].event_id:
            break
        spoken = Spoken(tokenizer, make, said, sampling, chance)
        more = resumed(spoken, taken[-1].event_id)
        if not more:
            break

    assert _without_counts(events) == _without_counts(undisturbed)


def test_an_answer_that_came_out_differently_is_not_gone_on_with(tokenizer: Tokenizer) -> None:
    chance = random.Random(0)
    events = received(Spoken(tokenizer, chat(), PLAIN, {}, chance).rest())
    other = Spoken(tokenizer, chat(), PLAIN.replace("q", "k"), {}, chance)
    with pytest.raises(ApiError, match="came out differently") as raised:
        resumed(other, events[-2].event_id)
    assert raised.value.status == 410


NO_IDS = ["", "7", "1-2-3-4", "g-0-1", "1-0-1e1", "1-0-_" + "9" * 10, "1-0-1\n"]


@pytest.mark.parametrize("text", NO_IDS)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="Last-Event-ID") as raised:
        Position.parse(text)
    assert raised.value.status == 400
