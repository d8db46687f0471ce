"""Sampling parameters on the command line, under their own names."""

import argparse

import msgspec

from scheduler.sampling import SamplingParams


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Options for what people change; what is not given is the model's default, then ours."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        default=max_tokens,
        help="most tokens of an answer; 0: as many as the context holds (default: %(default)s)",
    )
    for option, kind, text in (
        ("--temperature", float, "0 takes the most probable token; more is more random"),
        ("--top-p", float, "keep the likeliest tokens that reach this share together"),
        ("--top-k", int, "keep this many of the likeliest tokens; 0 keeps all"),
        ("--min-p", float, "drop tokens less likely than this share of the likeliest one"),
        ("--repetition-penalty", float, "above 1, tokens of prompt and answer come less often"),
        ("--presence-penalty", float, "above 0, tokens of the answer come less often"),
        ("--frequency-penalty", float, "the same, for each time that they came"),
        ("--min-tokens", int, "fewest tokens of an answer"),
        ("--seed", int, "the same seed gives the same answers"),
        ("--n", int, "answers per prompt"),
    ):
        group.add_argument(
            option,
            type=kind,
            metavar="N" if kind is int else "X",
            default=argparse.SUPPRESS,
            help=text,
        )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="end the answer before this text; may be repeated",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=argparse.SUPPRESS,
        help="do not end at the model's own end token",
    )


def sampling_of(arguments: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """The defaults with what was given put over them.

    Raises:
        InvalidRequest: a value out of its range.
    """
    given = {name: value for name, value in vars(arguments).items() if name in _FIELDS}
    given["max_tokens"] = arguments.max_tokens or None
    return msgspec.structs.replace(defaults, **given)


_FIELDS = frozenset(SamplingParams.__struct_fields__)
