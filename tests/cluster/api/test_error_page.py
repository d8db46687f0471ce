"""docs/errors.md names each error that there is, as it is, and no other."""

import re
from pathlib import Path

from cluster.api import errors
from cluster.api.errors import ErrorKind

PAGE = Path(__file__).parents[3] / "docs" / "errors.md"

Row = tuple[int, str, str | None]


def rows_of_the_page() -> list[Row]:
    found = re.findall(r"(?m)^\| (\d{3}) \| `(\w+)` \| (?:`(\w+)`|–) \|", PAGE.read_text("utf-8"))
    return [(int(status), kind, code or None) for status, kind, code in found]


def rows_of_the_code() -> list[Row]:
    kinds = [value for value in vars(errors).values() if isinstance(value, ErrorKind)]
    return [(kind.status, kind.type, kind.code) for kind in kinds]


def test_the_page_of_errors_names_each_kind_once() -> None:
    rows = rows_of_the_page()
    assert len(rows) == len(set(rows)) > 10
    assert set(rows) == set(rows_of_the_code())


def test_a_code_means_one_status() -> None:
    codes = [code for _, _, code in rows_of_the_code() if code is not None]
    assert len(codes) == len(set(codes))


def test_whatever_may_be_tried_again_says_when() -> None:
    kinds = [value for value in vars(errors).values() if isinstance(value, ErrorKind)]
    assert {kind.status for kind in kinds if kind.retry_after_s} == {429, 503}
    assert all(kind.retry_after_s for kind in kinds if kind.status in (429, 503))
