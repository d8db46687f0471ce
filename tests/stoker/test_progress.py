"""The progress bar: for people at a terminal, and for nobody else."""

import io
import sys

import pytest

from stoker.progress import answers_bar, starting_spinner
from tests.stoker.test_summary import make_output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, *, is_wanted: bool = True) -> str:
    monkeypatch.setattr(sys, "stderr", screen)
    with starting_spinner("tiny", is_wanted=is_wanted):
        pass
    with answers_bar(2, is_wanted=is_wanted) as tell:
        tell(make_output(1, 3, "stop", 0.1))
        tell(make_output(1, 3, "stop", 0.1))
    return screen.getvalue()


def test_a_terminal_sees_answers_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    shown = show(monkeypatch, Terminal())

    assert "starting a cluster for tiny" in shown
    assert "2/2" in shown
    assert "tokens/s" in shown


def test_a_file_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(monkeypatch, io.StringIO()) == ""


def test_who_does_not_want_it_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(monkeypatch, Terminal(), is_wanted=False) == ""
