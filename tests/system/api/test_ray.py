"""Everything at once, as somebody would run it: Ray, two ranks, two front ends, a key, a form."""

import json
import os
import tempfile
from pathlib import Path

import jsonschema
import openai
import psutil
import pytest

from tests.system.api.serving import Serving

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
}
ASKED = {
    "messages": [{"role": "user", "content": "Which city?"}],
    "response_format": FORMAT,
    "max_tokens": 60,
    "temperature": 1.0,
    "n": 3,
    "seed": 1,
}


def folders_of_ray() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("stoker-ray-*")}


def ids_in_use() -> set[int]:
    """Of all processes of this user; Ray's own leave our family when they start."""
    return {
        process.pid
        for process in psutil.process_iter(["uids"])
        if process.info["uids"] and process.info["uids"].real == os.getuid()
    }


def of_ray(ids: set[int]) -> list[str]:
    found = []
    for number in ids:
        try:
            process = psutil.Process(number)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return [line for line in found if "stoker-ray-" in line or "raylet" in line or "ray::" in line]


def test_ray_and_http_together_answer_and_leave_nothing(smollm2: Path, no_leaks: None) -> None:
    folders, ids = folders_of_ray(), ids_in_use()
    options = ("--backend=ray", "--tensor-parallel-size=2", "--api-servers=2")
    with Serving(smollm2, *options) as serving:
        serving.wait_up()
        assert len(serving.api_servers) == 2
        assert of_ray(ids_in_use() - ids), "it does not run under Ray"

        with serving.sdk() as sdk:
            for streams in (False, True):
                answers = ask(sdk, serving.model, streams)
                assert len(answers) == 3
                for text in answers:
                    jsonschema.validate(json.loads(text), SCHEMA)
        with serving.sdk() as sdk, pytest.raises(openai.AuthenticationError):
            sdk.with_options(api_key="another").models.list()

        serving.ask_to_end()
        assert serving.wait() == 0
    assert of_ray(ids_in_use() - ids) == []
    assert folders_of_ray() <= folders


def ask(sdk: openai.OpenAI, model: str, streams: bool) -> list[str]:
    """The texts of all choices, streamed or whole."""
    if not streams:
        whole = sdk.chat.completions.create(model=model, **ASKED)  # type: ignore[call-overload]
        return [choice.message.content for choice in whole.choices]
    texts = [""] * 3
    chunks = sdk.chat.completions.create(model=model, stream=True, **ASKED)  # type: ignore[call-overload]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts
