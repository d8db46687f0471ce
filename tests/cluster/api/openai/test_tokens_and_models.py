"""Token ids, names of the model, and the description of it all."""

import re

from cluster.api.openai.chat_body import ChatBody
from cluster.api.openai.completion_body import CompletionBody
from tests.cluster.api.conftest import StartRig
from tests.cluster.api.rig import ApiRig

HI = [{"role": "user", "content": "hi"}]


def test_a_prompt_is_tokenized_as_completions_do(rig: ApiRig) -> None:
    ids = rig.tokenizer.encode("the fox")
    told = rig.post("/tokenize", prompt="the fox", model="tiny").json()
    assert told == {"count": len(ids), "max_model_len": 64, "tokens": ids}
    bare = rig.post("/tokenize", prompt="the fox", add_special_tokens=False).json()
    assert bare["tokens"] == ids[1:]
    texts = rig.post("/tokenize", prompt="the fox", return_token_strs=True).json()["token_strs"]
    assert texts == ["<|begin|>", *(rig.tokenizer.token_text(token_id) for token_id in ids[1:])]


def test_messages_are_tokenized_as_chats_do(rig: ApiRig) -> None:
    told = rig.post("/tokenize", messages=HI).json()
    assert told["tokens"] == rig.tokenizer.encode_chat(HI)
    body = {"messages": HI, "add_generation_prompt": False}
    told = rig.post("/tokenize", **body).json()
    assert told["tokens"] == rig.tokenizer.encode_chat(HI, add_generation_prompt=False)
    usage = rig.post("/v1/chat/completions", messages=HI).json()["usage"]
    assert usage["prompt_tokens"] == rig.post("/tokenize", messages=HI).json()["count"]


def test_ids_become_the_text_that_they_came_from(rig: ApiRig) -> None:
    text = "hello 👩‍👩‍👧‍👦 <|im_end|>"
    ids = rig.tokenizer.encode(text, add_special_tokens=False)
    assert rig.post("/detokenize", tokens=ids).json() == {"prompt": text}
    assert rig.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_wrong_questions_about_tokens_are_bad_requests(rig: ApiRig) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "other": 1}, "other"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        answer = rig.post(path, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
    assert rig.post("/tokenize", prompt="a", model="x").status_code == 404


def test_models_are_listed_under_each_of_their_names(start_rig: StartRig) -> None:
    rig = start_rig(served_model_names=("tiny", "org/alias"))
    models = rig.openai().models.list().data
    assert [model.id for model in models] == ["tiny", "org/alias"]
    assert {model.owned_by for model in models} == {"stoker"}
    assert {model.max_model_len for model in models} == {64}  # type: ignore[attr-defined]
    assert rig.openai().models.retrieve("org/alias").id == "org/alias"
    assert rig.http.get("/v1/models/org/alias").json()["root"] == "tiny"


def test_the_version_is_that_of_the_package(rig: ApiRig) -> None:
    from importlib.metadata import version

    assert rig.http.get("/version").json() == {"version": version("stoker")}


def test_the_description_names_every_route_and_field(rig: ApiRig) -> None:
    described = rig.http.get("/openapi.json").json()

    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"} <= set(
        described["paths"]
    )
    for kind in (CompletionBody, ChatBody):
        properties = described["components"]["schemas"][kind.__name__]["properties"]
        assert set(properties) == set(kind.model_fields)
        wanted = [name for name, field in kind.model_fields.items() if field.description is None]
        assert wanted == ["stream_options"]
    for route in described["paths"].values():
        for operation in route.values():
            (good,) = [code for code in operation["responses"] if code.startswith("2")]
            assert operation["responses"][good]["content"]


def test_the_description_is_also_a_page_that_asks_no_other_host_for_anything(rig: ApiRig) -> None:
    answer = rig.http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    for text in (
        "POST /v1/chat/completions",
        "truncate_prompt_tokens",
        "ChatCompletion",
        "-2 to 2",
    ):
        assert text in answer.text
    assert "<script" not in answer.text
    assert not re.search(r"(src|href)=\"(https?:)?//", answer.text)
