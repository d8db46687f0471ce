"""What is refused at the border, and what a request is completed with."""

import logging
from typing import Any

import numpy as np
import pytest

from cluster.frontend.draft import Draft, RequestOptions, default_sampling, draft_of
from cluster.frontend.tokenizer import Tokenizer
from cluster.messages.clients import GenerationDefaults, ServerInfo
from scheduler.errors import InvalidRequest
from scheduler.sampling import SamplingParams
from scheduler.structured import StructuredOutputs
from tests.cluster.frontend.fake_engine import make_info
from tests.cluster.frontend.tiny_tokenizers import llama3_like

TOKENIZER = Tokenizer(llama3_like())


def make_draft(
    prompt: object = "the quick fox",
    sampling: SamplingParams | None = None,
    *,
    info: ServerInfo | None = None,
    tokenizer: Tokenizer | None = TOKENIZER,
    seed: int = 7,
    **options: object,
) -> Draft:
    return draft_of(
        prompt,  # type: ignore[arg-type]
        SamplingParams() if sampling is None else sampling,
        RequestOptions(**options),  # type: ignore[arg-type]
        info=make_info() if info is None else info,
        tokenizer=tokenizer,
        seed=seed,
        request_id="made-up",
    )


@pytest.mark.parametrize("prompt", [[], (), {"prompt_token_ids": []}], ids=["list", "tuple", "map"])
def test_a_prompt_without_tokens_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest, match=r"empty.*at least 1") as caught:
        make_draft(prompt)

    assert caught.value.param == "prompt"


def test_an_empty_text_is_refused_where_the_tokenizer_adds_nothing() -> None:
    class AddsNothing(Tokenizer):
        def encode(self, text: str, **_: bool) -> list[int]:  # type: ignore[override]
            return super().encode(text, add_special_tokens=False)

    with pytest.raises(InvalidRequest, match="empty"):
        make_draft("", tokenizer=AddsNothing(llama3_like()))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (5, "a text or a list"),
        (None, "a text or a list"),
        (b"bytes", "a text or a list"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"text": "a"}, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "list of token ids"),
        ({"prompt_token_ids": [1, "2"]}, "integers"),
        ([1, True], "integers"),
        ([1, 2.0], "integers"),
        ("broken \ud800", "Unicode"),
    ],
)
def test_a_prompt_of_the_wrong_type_is_refused(prompt: object, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        make_draft(prompt)


def test_ids_may_be_an_array_of_numpy() -> None:
    assert make_draft(np.array([3, 1, 2])).prompt_token_ids == [3, 1, 2]
    assert make_draft({"prompt_token_ids": np.array([4], np.int64)}).prompt_token_ids == [4]
    for wrong in (np.array([1.5]), np.array([[1, 2]]), np.array([True])):
        with pytest.raises(InvalidRequest):
            make_draft(wrong)


@pytest.mark.parametrize("token", [-1, 512, 2**31, 2**70])
def test_a_prompt_id_outside_the_vocabulary_is_refused_with_the_range(token: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"{token}.*0 to 511"):
        make_draft([1, token, 2])


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers() -> None:
    for length in (64, 65, 9000):
        with pytest.raises(InvalidRequest, match=rf"{length} tokens.* 64"):
            make_draft([1] * length)


def test_a_prompt_of_one_less_than_the_context_yields_one_token() -> None:
    draft = make_draft([1] * 63, SamplingParams(max_tokens=20))

    assert draft.sampling.max_tokens == 1


def test_no_max_tokens_fills_the_context() -> None:
    draft = make_draft([1] * 30, SamplingParams(max_tokens=None))

    assert draft.sampling.max_tokens == 34


def test_min_tokens_beyond_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens=40.*30 tokens.*34.*64") as caught:
        make_draft([1] * 30, SamplingParams(max_tokens=None, min_tokens=40))

    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {999999: 5.0}},
        {"allowed_token_ids": [1, 512]},
        {"stop_token_ids": [512]},
        {"bad_word_ids": [[3, 600]]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_sampling_id_outside_the_vocabulary_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="0 to 511") as caught:
        make_draft("hi", SamplingParams(**fields))

    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 1.5},
        {"priority": True},
        {"priority": 2**31},
        {"cache_salt": ""},
        {"cache_salt": 5},
        {"cache_salt": "x" * 2000},
        {"request_id": ""},
        {"request_id": "x" * 300},
        {"timeout_s": 0},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": True},
        {"timeout_s": "1"},
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_draft(**options)

    assert caught.value.param == next(iter(options))


def test_sampling_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        make_draft("hi", {"temperature": 1.0})  # type: ignore[arg-type]


def test_outputs_have_consecutive_seeds_from_the_callers_own() -> None:
    draft = make_draft("hi", SamplingParams(n=3, seed=100))

    requests = draft.requests([4, 5, 6])

    assert [request.handle for request in requests] == [4, 5, 6]
    assert [request.sampling.seed for request in requests] == [100, 101, 102]
    assert {request.sampling.n for request in requests} == {1}


def test_without_a_seed_the_drawn_one_counts() -> None:
    draft = make_draft("hi", SamplingParams(n=2), seed=7)

    assert [request.sampling.seed for request in draft.requests([1, 2])] == [7, 8]


def test_a_form_stays_at_home_and_travels_as_a_grammar(no_leaks: None) -> None:
    tokenizer = Tokenizer(llama3_like())
    form = StructuredOutputs(regex="[0-9]+")

    draft = make_draft("hi", SamplingParams(structured_outputs=form), tokenizer=tokenizer)

    (request,) = draft.requests([3])
    assert draft.sampling.structured_outputs == form
    assert request.sampling.structured_outputs is None
    assert request.sampling.grammar == "start: /[0-9]+/"
    with pytest.raises(InvalidRequest, match="cannot be followed") as refused:
        make_draft("hi", SamplingParams(grammar="start: b"), tokenizer=tokenizer)
    assert refused.value.param == "grammar"
    tokenizer.close()


def test_texts_stay_at_home_and_bad_words_travel_as_ids() -> None:
    draft = make_draft("hi", SamplingParams(stop=["end"], bad_words=["dog"], bad_word_ids=[[5]]))

    (request,) = draft.requests([1])

    assert request.sampling.stop == ()
    assert request.sampling.bad_words == ()
    assert (5,) in request.sampling.bad_word_ids
    assert len(request.sampling.bad_word_ids) > 1
    assert draft.sampling.stop == ("end",)


def test_a_request_carries_what_the_caller_said() -> None:
    draft = make_draft("hi", priority=-3, cache_salt="tenant", timeout_s=2, request_id="mine")

    (request,) = draft.requests([1])

    assert (request.priority, request.cache_salt, request.timeout_s) == (-3, "tenant", 2)
    assert request.label == draft.request_id == "mine"
    assert request.end_ids == make_info().end_ids
    assert list(request.prompt) == draft.prompt_token_ids


def test_a_model_without_a_tokenizer_takes_ids_only() -> None:
    assert make_draft([1, 2], tokenizer=None).prompt_token_ids == [1, 2]
    for prompt, sampling in (
        ("text", SamplingParams()),
        ([1], SamplingParams(stop=["x"])),
        ([1], SamplingParams(bad_words=["x"])),
        ([1], SamplingParams(structured_outputs=StructuredOutputs(choice=["x"]))),
        ([1], SamplingParams(grammar="start: /x/")),
    ):
        with pytest.raises(InvalidRequest, match="tokenizer"):
            make_draft(prompt, sampling, tokenizer=None)


def test_the_models_defaults_hold_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        sampling = default_sampling(GenerationDefaults(temperature=0.6, top_k=40))

    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 40, 1.0)
    assert "generation_defaults_hold temperature=0.6 top_k=40" in caplog.text


def test_a_default_that_no_caller_may_ask_for_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampling = default_sampling(GenerationDefaults(temperature=0.5, top_p=7.0))

    assert (sampling.temperature, sampling.top_p) == (0.5, 1.0)
    assert "top_p" in caplog.text
