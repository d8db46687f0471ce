"""A progress bar on standard error, only where a person looks at it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stoker.client import OnAnswer
from stoker.outputs import RequestOutput

Advance = Callable[[int, str], None]
"""Told of each answer: its tokens, and what else is to stand beside their rate."""


@contextmanager
def tokens_bar(label: str, total: int | None, *, redraws_per_s: float = 10.0) -> Iterator[Advance]:
    """A bar over answers with their tokens per second; yields what to tell of each.

    Args:
        total: answers there will be; None: nobody knows.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=redraws_per_s
    ) as bar:
        task = bar.add_task(label, total=total, rate="")
        num_tokens = 0

        def advance(new_tokens: int, remark: str) -> None:
            nonlocal num_tokens
            num_tokens += new_tokens
            elapsed_s = bar.tasks[0].elapsed or 0.0
            rate = f"{num_tokens / elapsed_s:.0f} tokens/s" if elapsed_s > 0 else ""
            bar.update(task, advance=1, rate=f"{rate}, {remark}" if remark else rate)

        yield advance


@contextmanager
def answers_bar(count: int, *, is_wanted: bool = True) -> Iterator[OnAnswer]:
    """A bar over `count` answers with tokens per second; yields what to tell of each answer."""
    if not is_wanted or count == 0 or not sys.stderr.isatty():
        yield _say_nothing
        return
    with tokens_bar("answers", count) as advance:

        def tell(output: RequestOutput) -> None:
            advance(sum(len(completion.token_ids) for completion in output.outputs), "")

        yield tell


@contextmanager
def starting_spinner(model: str, *, is_wanted: bool = True) -> Iterator[None]:
    """A sign of life while a cluster starts."""
    if not is_wanted or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"starting a cluster for {model}"):
        yield


def _say_nothing(_: RequestOutput) -> None:
    pass
