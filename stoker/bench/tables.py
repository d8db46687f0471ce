"""Tables: drawn where a person looks on, Markdown where the output goes elsewhere."""

import sys
from collections.abc import Sequence


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table on standard output; the first row is the head."""
    if sys.stdout.isatty():
        _draw(rows)
    else:
        print(markdown_table(rows))
    print()


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head, the first column is aligned left."""
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines.insert(1, "| " + " | ".join(rule) + " |")
    return "\n".join(lines)


def _draw(rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    head, *body = rows
    table = Table()
    for i, title in enumerate(head):
        table.add_column(title, justify="left" if i == 0 else "right")
    for row in body:
        table.add_row(*row)
    Console(highlight=False, markup=False, emoji=False).print(table)
