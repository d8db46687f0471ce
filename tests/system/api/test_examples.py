"""docs/serving.md tells the truth: its examples run, and its tables name every field."""

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cluster.api.openai.chat_body import ChatBody
from cluster.api.openai.completion_body import CompletionBody
from cluster.api.openai.generation_body import GenerationBody
from cluster.api.openai.responses_body import ResponsesBody
from tests.system.api.serving import KEY, WAIT_S, Serving

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"
BASES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
}
ROUTES_OF_TABLE = {
    "both": ("/v1/completions", "/v1/chat/completions"),
    "chat": ("/v1/chat/completions",),
    "completions": ("/v1/completions",),
    "responses": ("/v1/responses",),
}


def blocks(language: str, text: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def pointed_at(served: Serving, program: str) -> str:
    """The program as somebody writes it who has this server and its key."""
    told = program.replace(URL, served.base_url).replace('api_key="none"', f'api_key="{KEY}"')
    return told.replace(
        f'httpx.Client(base_url="{served.base_url}")',
        f'httpx.Client(base_url="{served.base_url}", '
        f'headers={{"Authorization": "Bearer {KEY}"}}, timeout=60)',
    )


def rows(table: str) -> list[tuple[str, object]]:
    """Field and example of each row of the table behind a mark."""
    body = PAGE.split(f"<!-- fields: {table} -->")[1].split("\n\n")[1]
    cells = [line.split(" | ")[:2] for line in body.splitlines()[2:]]
    return [(name.strip("| `"), json.loads(example.strip("`"))) for name, example in cells]


def test_the_tables_name_every_field() -> None:
    shared = set(GenerationBody.model_fields)
    assert {name for name, _ in rows("both")} == shared
    assert {name for name, _ in rows("chat")} == set(ChatBody.model_fields) - shared
    assert {name for name, _ in rows("completions")} == set(CompletionBody.model_fields) - shared
    assert {name for name, _ in rows("responses")} == set(ResponsesBody.model_fields) - shared


def test_every_example_in_python_runs(served: Serving) -> None:
    programs = blocks("python")
    assert len(programs) > 5
    names: dict[str, object] = {}
    try:
        for program in programs:
            exec(compile(with_key(program, served), "docs/serving.md", "exec"), names)
    finally:
        for name in ("client", "server"):
            if name in names:
                names[name].close()  # type: ignore[attr-defined]


def with_key(program: str, served: Serving) -> str:
    """The program as a caller of this server writes it."""
    bare = f'Client(base_url="{served.base_url}")'
    key = f'headers={{"Authorization": "Bearer {KEY}"}}, timeout={WAIT_S}'
    told = program.replace(URL, served.base_url).replace('api_key="none"', f'api_key="{KEY}"')
    return told.replace(bare, f"{bare[:-1]}, {key})")


def test_every_example_in_the_shell_runs(served: Serving) -> None:
    commands = blocks("sh")
    assert commands
    for command in commands:
        told = command.replace(URL, served.base_url)
        told = told.replace("curl -s", f"curl -sf -H 'Authorization: Bearer {KEY}'")
        done = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["choices"]


def examples() -> Iterator[tuple[str, str, object]]:
    for table, routes in ROUTES_OF_TABLE.items():
        for name, value in rows(table):
            for route in routes:
                yield route, name, value


@pytest.mark.slow
def test_every_field_takes_its_example(http: httpx.Client) -> None:
    def ask(example: tuple[str, str, object]) -> None:
        route, name, value = example
        body = {**BASES[route], name: value}
        if name == "max_completion_tokens":
            del body["max_tokens"]
        answer = http.post(route, json=body)
        assert answer.status_code == 200, f"{name}: {answer.text}"
        assert "x-stoker-warning" not in answer.headers

    with ThreadPoolExecutor(32) as threads:
        list(threads.map(ask, examples()))
