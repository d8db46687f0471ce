"""Fields that we do not read: accepted, refused or told, as the page says."""

import pytest

from cluster.api.errors import ApiError
from cluster.api.openai.chat_body import ChatBody
from cluster.api.openai.completion_body import CompletionBody
from cluster.api.openai.unknown_fields import UNSUPPORTED, unknown_fields, warning_of
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.rig import ApiRig

HI = [{"role": "user", "content": "hi"}]


def test_labels_and_hints_are_accepted_in_silence(rig: ApiRig) -> None:
    labels = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    hints = {"parallel_tool_calls": True, "safety_identifier": "x", "prompt_cache_key": "y"}
    answer = rig.post("/v1/chat/completions", messages=HI, **labels, **hints)
    assert answer.status_code == 200
    assert "x-stoker-warning" not in answer.headers


def test_an_unknown_field_is_told_in_a_header_with_the_name_that_was_meant(rig: ApiRig) -> None:
    unknown = {"temperator": 1, "topK": 5, "zzz": None, "é\n": 1}
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": HI}),
    ):
        for stream in (False, True):
            answer = rig.post(path, **body, **unknown, stream=stream)
            assert answer.status_code == 200
            assert answer.headers["x-stoker-warning"] == (
                "unknown fields were ignored: temperator (did you mean temperature?), "
                "topK (did you mean top_k?), ??"
            )


def test_an_unknown_field_is_refused_if_the_server_says_so(start_rig: StartRig) -> None:
    rig = start_rig(unknown_fields="refuse")
    answer = rig.post("/v1/completions", prompt="a", topK=5)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "topK"
    assert "did you mean top_k?" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_field_that_would_change_the_answer_is_refused_unless_it_asks_for_nothing(
    name: str,
) -> None:
    kinds = [kind for kind in (ChatBody, CompletionBody) if name not in kind.model_fields]
    assert kinds
    for kind in kinds:
        base = {"messages": HI, "prompt": "a"}
        for harmless in (None, *UNSUPPORTED[name]):
            body = kind.model_validate({**base, name: harmless})
            assert name not in unknown_fields(body)
        with pytest.raises(ApiError) as caught:
            unknown_fields(kind.model_validate({**base, name: "something else"}))
        assert caught.value.param == name


def test_options_of_a_stream_count_as_well() -> None:
    options = {"include_usage": True, "includeUsage": True}
    body = ChatBody.model_validate({"messages": HI, "stream": True, "stream_options": options})
    assert unknown_fields(body) == ["stream_options.includeUsage"]


def test_many_unknown_fields_make_a_short_line() -> None:
    body = CompletionBody.model_validate({"prompt": "a", **{f"x{i}": 1 for i in range(1000)}})
    assert len(warning_of(body, unknown_fields(body))) < 1000
