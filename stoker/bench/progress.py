"""A progress bar over the requests of a run, on standard error, where a person looks on."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.bench.load import Watcher, is_ok
from stoker.bench.record import Record


@contextmanager
def requests_bar(label: str, total: int | None, *, is_wanted: bool) -> Iterator[Watcher]:
    """A bar of answers, tokens and failures; yields what to tell of each request that ended.

    Args:
        total: requests there will be; None: nobody knows.
    """
    if not is_wanted or not sys.stderr.isatty():
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
    # Drawn seldom: drawing is work that the measurement would see.
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task(label, total=total, rate="")
        num_tokens = num_bad = 0

        def tell(record: Record) -> None:
            nonlocal num_tokens, num_bad
            num_tokens += record.output_tokens
            num_bad += not is_ok(record)
            elapsed_s = bar.tasks[0].elapsed or 0.0
            rate = f"{num_tokens / elapsed_s:.0f} tokens/s" if elapsed_s > 0 else ""
            bar.update(task, advance=1, rate=f"{rate}, {num_bad} failed" if num_bad else rate)

        yield tell


def _say_nothing(record: Record) -> None:
    pass
