"""A progress bar on standard error, only where a person looks at it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.client import OnAnswer
from stoker.outputs import RequestOutput


@contextmanager
def answers_bar(count: int, *, is_wanted: bool = True) -> Iterator[OnAnswer]:
    """A bar over `count` answers with tokens per second; yields what to tell of each answer."""
    if not is_wanted or count == 0 or not sys.stderr.isatty():
        yield _say_nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("answers", total=count, rate="")
        num_tokens = 0

        def tell(output: RequestOutput) -> None:
            nonlocal num_tokens
            num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            elapsed_s = bar.tasks[0].elapsed or 0.0
            rate = f"{num_tokens / elapsed_s:.0f} tokens/s" if elapsed_s > 0 else ""
            bar.update(task, advance=1, rate=rate)

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
