"""A progress bar over the requests of a run, on standard error, where a person looks on."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.bench.load import Watcher, is_ok
from stoker.bench.record import Record
from stoker.progress import tokens_bar


@contextmanager
def requests_bar(label: str, total: int | None, *, is_wanted: bool) -> Iterator[Watcher]:
    """A bar of answers, tokens and failures; yields what to tell of each request that ended.

    Args:
        total: requests there will be; None: nobody knows.
    """
    if not is_wanted or not sys.stderr.isatty():
        yield _say_nothing
        return
    # Drawn seldom: drawing is work that the measurement would see.
    with tokens_bar(label, total, redraws_per_s=2.0) as advance:
        num_bad = 0

        def tell(record: Record) -> None:
            nonlocal num_bad
            num_bad += not is_ok(record)
            advance(record.output_tokens, f"{num_bad} failed" if num_bad else "")

        yield tell


def _say_nothing(record: Record) -> None:
    pass
