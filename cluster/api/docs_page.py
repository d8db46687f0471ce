"""`GET /docs`: the description of all routes as a page, which asks no other host for anything."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

Schema = Mapping[str, object]

router = APIRouter(tags=["server"])

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; font-size: 1.1rem; } h2 code { font-size: 1.1rem; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
td, th { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; }
tr { border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent); }
code { overflow-wrap: anywhere; } summary { cursor: pointer; }
"""


@router.get("/docs", response_class=HTMLResponse)
async def get_docs(request: Request) -> Response:
    """This description, for people."""
    return HTMLResponse(page_of(request.app.openapi()))


def page_of(description: Mapping[str, object]) -> str:
    """An OpenAPI description as HTML."""
    info = cast(Mapping[str, str], description["info"])
    title = escape(f"{info['title']} {info['version']}")
    return "".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
            '<meta name="viewport" content="width=device-width">',
            f"<style>{_STYLE}</style><h1>{title}</h1>",
            '<p>The same for programs: <a href="openapi.json">openapi.json</a></p>',
            *_operations(description),
            "</html>",
        ]
    )


def _operations(description: Mapping[str, object]) -> Iterator[str]:
    for path, operations in _maps(description["paths"]):
        for method, operation in _maps(operations):
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            said = operation.get("description", operation.get("summary", ""))
            yield f"<p>{escape(str(said))}</p>"
            body = operation.get("requestBody")
            if isinstance(body, Mapping):
                yield from _fields("Body", body, description)
            for status, response in _maps(operation["responses"]):
                if status == "200":
                    yield from _fields("Answer", response, description)


def _fields(title: str, message: Schema, description: Mapping[str, object]) -> Iterator[str]:
    """A table for each kind of content that a message may have."""
    for kind, content in _maps(message.get("content", {})):
        schema = content.get("schema", {})
        assert isinstance(schema, Mapping)
        name = _name(schema)
        yield f"<details><summary>{title}: {escape(kind)}, <code>{escape(name)}</code></summary>"
        yield "<table>"
        found = _resolved(schema, description)
        required = cast(list[str], found.get("required", []))
        for field, inner in _maps(found.get("properties", {})):
            text = str(inner.get("description", ""))
            mark = " *" if field in required else ""
            yield f"<tr><td><code>{escape(field)}</code>{mark}"
            yield f"<td><code>{escape(_name(inner))}</code><td>{escape(text)}"
        yield "</table></details>"


def _resolved(schema: Schema, description: Mapping[str, object]) -> Schema:
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    found: object = description
    for step in reference.removeprefix("#/").split("/"):
        found = cast(Mapping[str, object], found)[step]
    return cast(Schema, found)


def _name(schema: Schema) -> str:
    """A type in few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for several in ("anyOf", "oneOf"):
        if several in schema:
            names = [_name(each) for each in cast(list[Schema], schema[several])]
            return " | ".join(dict.fromkeys(names))
    if "enum" in schema or "const" in schema:
        values = cast(list[object], schema.get("enum", [schema.get("const")]))
        return " | ".join(map(repr, values))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_name(cast(Schema, schema.get('items', {})))}"
    return kind


def _maps(value: object) -> Iterator[tuple[str, Schema]]:
    """Entries of a map of maps."""
    yield from cast(Mapping[str, Schema], value).items()
