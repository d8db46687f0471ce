"""What settings are made of, and how a command offers them as options.

A setting is a field of a struct with `Annotated[type, setting(text)]`: `limit_s` is the option
`--limit-s`; a switch has a `--no-` form too; one that holds several texts is given once for
each, in the singular (`keys` as `--key`).
"""

import argparse
import typing
from collections.abc import Collection
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

AtLeastOne: TypeAlias = Annotated[int, Meta(ge=1)]
NotNegative: TypeAlias = Annotated[int, Meta(ge=0)]
OneOrTwo: TypeAlias = Annotated[int, Meta(ge=1, le=2)]
PortNumber: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
Positive: TypeAlias = Annotated[float, Meta(gt=0)]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
ShareBelowOne: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]
TimeOrNone: TypeAlias = Annotated[float, Meta(ge=0)]


def setting(text: str) -> Meta:
    """What a setting means, as a sentence or a few words."""
    return Meta(description=text)


def add_options(
    parser: argparse.ArgumentParser, kind: type[Struct], title: str, *, but: Collection[str] = ()
) -> None:
    """One option for each setting of a struct; what is not given leaves no trace."""
    group = parser.add_argument_group(title)
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if name in but:
            continue
        option = f"--{name.replace('_', '-')}"
        takes, text = kind_and_text(hint)
        if takes is bool:
            group.add_argument(
                option, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        elif takes is list:
            group.add_argument(
                option.removesuffix("s"),
                dest=name,
                action="append",
                metavar="TEXT",
                default=argparse.SUPPRESS,
                help=f"{text} May be repeated.",
            )
        elif isinstance(takes, tuple):
            group.add_argument(option, choices=takes, default=argparse.SUPPRESS, help=text)
        else:
            group.add_argument(
                option,
                type=takes,
                metavar={int: "N", float: "X", str: "TEXT"}[takes],
                default=argparse.SUPPRESS,
                help=text,
            )


def kind_and_text(hint: object) -> tuple[type | tuple[str, ...], str]:
    """What an option takes (bool, int, float, str, one of some words, or a list), its text."""
    plain, *metas = typing.get_args(hint)
    text = str(metas[-1].description)
    if typing.get_origin(plain) is Literal:
        return typing.get_args(plain), text
    if typing.get_origin(plain) is tuple:
        return list, text
    for possible in (plain, *typing.get_args(plain)):
        inner = typing.get_args(possible)[0] if typing.get_origin(possible) else possible
        if inner in (bool, int, float, str):
            return inner, text
    raise AssertionError(f"no option for {hint}")


def words_or_bounds(kind: type[Struct], name: str) -> tuple[str, tuple[str, ...], str]:
    """What is possible for a setting of a struct: JSON Schema's name of its type, the words that it
    may be (none: any), and its bounds, as "≥ 1, ≤ 2"."""
    entry = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"][name]
    for choice in entry.get("anyOf", ()):
        if choice.get("type") != "null":
            entry = choice
    bounds = [
        f"{sign} {entry[key]:g}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in entry
    ]
    return str(entry.get("type", "")), tuple(entry.get("enum", ())), ", ".join(bounds)
