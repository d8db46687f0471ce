"""Write the tables of settings and of messages into the pages under docs/, from the code.

    python scripts/doc_tables.py            writes them
    python scripts/doc_tables.py --check    changes nothing; fails if a page is out of date

A page marks the place of each table with `<!-- NAME: made by scripts/doc_tables.py -->` and
`<!-- end of NAME -->`. Texts come from where the code has them: a setting's description, a
message's docstring and the texts below its fields.
"""

import argparse
import ast
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from cluster import metrics
from cluster.config import API_KEY_VARIABLE, ENVIRONMENT
from cluster.doctor.checks import CHECKS
from cluster.engine_config import EngineConfig
from cluster.http_config import HttpConfig
from cluster.messages.sockets import FromClient, FromEngine, ToClient, ToEngine
from cluster.metrics import Family
from cluster.setting import words_or_bounds
from scheduler import arrays
from scheduler.request import Finish

DOCS = Path(__file__).resolve().parent.parent / "docs"

COLUMNS = {
    arrays.Int32Array: "int32 column",
    arrays.Uint8Array: "uint8 column",
    arrays.Float32Array: "float32 column",
    arrays.BoolArray: "bool column",
}
PLAIN = {
    int: "int",
    float: "float",
    str: "str",
    bytes: "bin",
    bool: "bool",
    type(None): "nil",
    object: "any",
}

Tables = dict[str, Callable[[], str]]
"""What makes each table, by the name in its mark."""


# --- settings -------------------------------------------------------------------------------


def settings_of(kind: type[Struct]) -> Callable[[], str]:
    """Every field of a struct of settings: name, default, what is possible, what it means."""

    def make() -> str:
        properties = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
        rows = [
            (
                f"`{name}`",
                _setting_default(entry["default"]),
                _possible(kind, name),
                entry["description"],
            )
            for name, entry in properties.items()
        ]
        return _table(("setting", "default", "possible", "meaning"), rows)

    return make


def environment_table() -> str:
    """The variables that are read, and what each gives."""
    rows = [(f"`{variable}`", f"`{name}`") for variable, name in ENVIRONMENT.items()]
    rows.append((f"`{API_KEY_VARIABLE}`", "`api_keys`, separated by commas"))
    rows.append(("`STOKER_CONFIG`", "path of a TOML file of settings, as `--config`"))
    return _table(("variable", "setting"), rows)


def _setting_default(value: object) -> str:
    if value is None or value in ("", [], ()):
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _possible(kind: type[Struct], name: str) -> str:
    of_type, words, bounds = words_or_bounds(kind, name)
    if words:
        return ", ".join(f"`{word}`" for word in words)
    texts = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false"}
    texts["array"] = "texts"
    return f"{texts[of_type]} {bounds}".strip()


# --- messages -------------------------------------------------------------------------------


def messages_of(union: object) -> Callable[[], str]:
    """The sections of all messages of one direction of one socket."""
    kinds = typing.get_args(union)
    return lambda: "\n\n".join(
        _section(kind, f"`{_tag(kind)}` ({kind.__name__})") for kind in kinds
    )


def all_messages() -> list[type[Struct]]:
    unions = (FromClient, ToClient, ToEngine, FromEngine)
    return [kind for union in unions for kind in typing.get_args(union)]


def parts() -> str:
    """The sections of all structs that messages are made of, in the order of their names."""
    found: dict[str, type[Struct]] = {}
    todo = all_messages()
    known = {kind.__name__ for kind in todo}
    while todo:
        kind = todo.pop()
        for hint in typing.get_type_hints(kind).values():
            for inner in _structs_in(hint):
                if inner.__name__ not in found and inner.__name__ not in known:
                    found[inner.__name__] = inner
                    todo.append(inner)
    return "\n\n".join(_section(found[name], name) for name in sorted(found))


def finish_table() -> str:
    """The finish codes."""
    texts = _field_texts(Finish)
    return _table(
        ("code", "name", "meaning"),
        [(str(int(code)), code.name.lower(), texts.get(code.name, "")) for code in Finish],
    )


def _section(kind: type[Struct], title: str) -> str:
    text = f"#### {title}\n\n{_plain(inspect.getdoc(kind) or '')}"
    texts = _field_texts(kind)
    hints = typing.get_type_hints(kind)
    rows = [
        (f"`{field.name}`", _wire_type(hints[field.name]), _default(field), texts[field.name])
        for field in msgspec.structs.fields(kind)
    ]
    return f"{text}\n\n{_table(('field', 'type', 'default', 'meaning'), rows)}" if rows else text


def _tag(kind: type[Struct]) -> str:
    return str(kind.__struct_config__.tag)


def _structs_in(hint: object) -> Iterable[type[Struct]]:
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
    for inner in typing.get_args(hint):
        yield from _structs_in(inner)


def _wire_type(hint: object) -> str:
    for column, name in COLUMNS.items():
        if hint == column:
            return name
    if hint in PLAIN:
        return PLAIN[hint]  # type: ignore[index]  # by the line above
    if isinstance(hint, type) and issubclass(hint, Struct):
        name = hint.__name__
        own = f"{_tag(hint)}-{name}" if hint in all_messages() else name  # a heading's anchor
        return f"[{name}](#{own.lower()})"
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_wire_type(one) for one in inner)
    if origin is typing.Literal:
        return "one of " + ", ".join(f"`{value}`" for value in inner)
    if origin is dict:
        return f"map of {_wire_type(inner[0])} to {_wire_type(inner[1])}"
    return f"array of {_wire_type(inner[0])}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default
    if value is msgspec.NODEFAULT:
        return "empty"
    if value is None:
        return "nil"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return "empty"


def _field_texts(kind: type) -> dict[str, str]:
    """The texts below the fields of a class and of what it extends; empty where there is none."""
    texts: dict[str, str] = {}
    for base in kind.__bases__:
        if issubclass(base, Struct) and base is not Struct:
            texts |= _field_texts(base)
    source = inspect.getsource(sys.modules[kind.__module__])
    (body,) = (
        node.body
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    name = ""
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            texts[name] = ""
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            texts[name] = ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            texts[name] = _plain(str(node.value.value))
    return texts


def _plain(text: str) -> str:
    """A docstring as paragraphs of one line, less what only Python has (`Raises:` and so on)."""
    text = re.split(r"\n\s*(?:Raises|Args|Returns|Shapes):", inspect.cleandoc(text))[0]
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


# --- metrics ---------------------------------------------------------------------------------


def metrics_table(families: Iterable[Family]) -> Callable[[], str]:
    """Each metric: name, kind, labels, vLLM's name for it, what it means."""
    rows = [
        (
            f"`{family.name}{'_total' if family.kind == 'counter' else ''}`",
            family.kind,
            ", ".join(f"`{label}`" for label in family.labels) or "–",
            f"`{_vllm_name(family)}`" if family.vllm else "–",
            family.text,
        )
        for family in families
    ]
    return lambda: _table(("after `stoker:`", "kind", "labels", "after `vllm:`", "meaning"), rows)


def _vllm_name(family: Family) -> str:
    return f"{family.vllm}_total" if family.kind == "counter" else family.vllm


# --- checks of the doctor ---------------------------------------------------------------------


def checks_table() -> str:
    """Each check and what it looks at, in the order in which they are told."""
    rows = [(check.name, check.looks_at, check.remedy) for check in CHECKS]
    return _table(("check", "looks at", "what usually helps"), rows)


# --- pages ----------------------------------------------------------------------------------

PAGES: dict[str, Tables] = {
    "configuration.md": {
        "settings": settings_of(EngineConfig),
        "settings of HTTP": settings_of(HttpConfig),
        "environment": environment_table,
    },
    "wire-protocol.md": {
        "messages from clients": messages_of(FromClient),
        "messages to clients": messages_of(ToClient),
        "messages to the engine": messages_of(ToEngine),
        "messages from the engine": messages_of(FromEngine),
        "parts": parts,
        "finish codes": finish_table,
    },
    "doctor.md": {"checks": checks_table},
    "metrics.md": {
        "engine metrics": metrics_table(metrics.ENGINE),
        "http metrics": metrics_table(metrics.HTTP),
    },
}


def renewed(page: str, tables: Tables) -> str:
    """The page with each table put in its place.

    Raises:
        ValueError: a mark is missing.
    """
    for name, make in tables.items():
        begin, end = f"<!-- {name}: made by scripts/doc_tables.py -->", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"no place for {name}: the page needs the marks {begin} and {end}")
        page = f"{before}{begin}\n\n{make()}\n\n{end}{after}"
    return page


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables of docs/ from the code.")
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    parser.add_argument(
        "--docs", type=Path, default=DOCS, metavar="DIR", help="where the pages are"
    )
    arguments = parser.parse_args()
    stale = []
    for name, tables in PAGES.items():
        path = arguments.docs / name
        page = path.read_text(encoding="utf-8")
        new = renewed(page, tables)
        if new == page:
            continue
        stale.append(path)
        if not arguments.check:
            path.write_text(new, encoding="utf-8")
    what_of_it = "is out of date; run scripts/doc_tables.py" if arguments.check else "written"
    for path in stale:
        print(f"{path} {what_of_it}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
