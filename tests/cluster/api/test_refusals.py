"""Bodies that are wrong, and what the official client makes of the answers."""

import json

import httpx
import openai
import pytest

from tests.cluster.api.conftest import StartRig
from tests.cluster.api.rig import ApiRig

HI = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

WRONG: list[tuple[str, dict[str, object], str]] = [
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1, 2.5]]}, "prompt"),
    (COMPLETIONS, {"prompt": [9999]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 64}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 200}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": 2.1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": True}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": 2}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 100_000}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 1.0}, "n"),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 100}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 2, "temperature": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "best_of": 0}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "best_of": "3"}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "echo": "yes"}, "echo"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -3}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0, "echo": True, "n": 2}, "n"),
    (COMPLETIONS, {"prompt": "a", "seed": "x"}, "seed"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a", ""]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 65}, "stop"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"999999": 5}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"abc": 5}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1e9}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1100)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "bad_words": [""]}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt"),
    (COMPLETIONS, {"prompt": "a", "timeout": 0}, "timeout"),
    (COMPLETIONS, {"prompt": "a", "timeout": "soon"}, "timeout"),
    (COMPLETIONS, {"prompt": "a", "priority": "high"}, "priority"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "stream": "true"}, "stream"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    (COMPLETIONS, {"prompt": "a", "model": 5}, "model"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 200}]}, "messages"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HI, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": 2}, "logprobs"),
    (CHAT, {"messages": HI, "max_completion_tokens": "5"}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "best_of": 2}, "best_of"),
    (CHAT, {"messages": HI, "modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"messages": HI, "reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"messages": HI, "web_search_options": {}}, "web_search_options"),
    (CHAT, {"messages": HI, "functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": HI, "service_tier": "priority"}, "service_tier"),
    (CHAT, {"messages": HI, "chat_template": "{{ x }}"}, "chat_template"),
    (CHAT, {"messages": HI, "chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "tool_choice": "maybe"}, "tool_choice"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=lambda value: repr(value)[:60])
def test_a_wrong_body_is_a_bad_request_that_names_the_field(
    rig: ApiRig, path: str, body: dict[str, object], param: str
) -> None:
    answer = rig.post(path, **body)

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None
    assert error["param"].split(".json_schema")[0] in (param, f"{param}.role", f"{param}.content")
    assert len(error["message"]) < 600
    with pytest.raises(openai.BadRequestError) as caught:
        rig.openai().post(path.removeprefix("/v1"), body=body, cast_to=httpx.Response)
    assert caught.value.param == error["param"]
    assert rig.engine.received.empty()
    assert rig.api.calls == {}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"", "missing"),
        (b"null", "a JSON object, got None"),
        (b"[]", "the body"),
        (b'"text"', "the body"),
        (b'{"prompt": "\xff"}', "cannot be read"),
        (rb'{"prompt": "\ud800"}', "not valid Unicode"),
        (rb'{"prompt": "a", "stop": "\ud800"}', "valid Unicode"),
        (rb'{"prompt": "a", "temperature": "\ud800"}', "ud800"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "cannot be read"),
    ],
    ids=[
        "open",
        "empty",
        "null",
        "list",
        "text",
        "bytes",
        "half",
        "stop",
        "echoed",
        "deep",
        "digits",
    ],
)
def test_a_body_that_cannot_be_read_is_a_bad_request(rig: ApiRig, body: bytes, said: str) -> None:
    answer = rig.http.post(COMPLETIONS, content=body, headers=JSON)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_form_is_not_taken_for_json(rig: ApiRig) -> None:
    answer = rig.http.post(COMPLETIONS, data={"prompt": "hi"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_route"),
        ("POST", "/v1/chat", 404, "unknown_route"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/redoc", 404, "unknown_route"),
    ],
)
def test_unknown_routes_methods_and_models_have_the_same_shape(
    rig: ApiRig, method: str, path: str, status: int, code: str
) -> None:
    answer = rig.http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/chat/completions", "perhaps /v1/chat/completions, if the base URL ended in /v1"),
        ("/v1/v1/chat/completions", "perhaps /v1/chat/completions, if the base URL had /v1 once"),
        ("/v1/chat", "GET /openapi.json lists"),
    ],
)
def test_a_base_url_without_v1_is_named(rig: ApiRig, path: str, says: str) -> None:
    assert says in rig.http.post(path).json()["error"]["message"]


def test_every_cap_names_what_came_and_what_may_be(start_rig: StartRig) -> None:
    rig = start_rig(max_prompts_per_request=3, max_outputs_per_request=4)

    def said(**body: object) -> str:
        answer = rig.post(COMPLETIONS, **{"prompt": "a", **body})
        assert answer.status_code == 400
        message: str = answer.json()["error"]["message"]
        return message

    cases: list[tuple[dict[str, object], str, str]] = [
        ({"prompt": ["a"] * 5}, "5", "3"),
        ({"n": 5}, "5", "4"),
        ({"prompt": ["a", "b"], "best_of": 3}, "6", "4"),
        ({"n": 300}, "300", "256"),
        ({"logprobs": 30}, "30", "20"),
        ({"logit_bias": dict.fromkeys(map(str, range(1100)), 1)}, "1100", "1024"),
        ({"stop": ["a"] * 70}, "70", "64"),
        ({"stop": ["a" * 17_000]}, "17000", "16384"),
        ({"stop_token_ids": [1] * 200}, "200", "128"),
        ({"bad_words": ["a"] * 300}, "300", "256"),
        ({"prompt": [5] * 70}, "70", "64"),
    ]
    for body, came, most in cases:
        message = said(**body)
        assert came in message, message
        assert most in message, message


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "URL"}},
        {"type": "input_audio", "input_audio": {"data": "URL", "format": "wav"}},
        {"type": "file", "file": {"file_data": "URL"}},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
    ],
    ids=lambda part: part["type"],
)
def test_media_are_refused_and_nothing_is_fetched(rig: ApiRig, part: dict[str, object]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        body = json.dumps({"messages": [{"role": "user", "content": [part]}]})
        answer = rig.http.post(CHAT, content=body.replace("URL", address), headers=JSON)

        assert answer.status_code == 400
        assert "text only" in answer.json()["error"]["message"]
        with pytest.raises(BlockingIOError):
            listener.accept()
