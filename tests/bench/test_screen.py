from __future__ import annotations

import sys

import pytest

from farcall.bench.screen import Screen
from farcall.bench.tables import TextTable

TABLE = TextTable("Speeds", ["system", "µs"], [["farcall", "1.0"]])


def test_results_and_notes_go_different_ways(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.table(TABLE)
    screen.line("on a [fast] machine")
    screen.note("by the way [1]", style="yellow")
    with screen.progress(2) as show:
        show("one", 0)
        show("all done", 2)
    out, err = capsys.readouterr()
    assert "Speeds" in out
    assert "farcall" in out
    assert "on a [fast] machine" in out
    assert "by the way [1]" in err
    assert "all done" in err


def test_without_rich_it_is_plain_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    screen = Screen()
    screen.table(TABLE)
    screen.line("a line")
    screen.note("a note", style="red")
    with screen.progress(1) as show:
        show("one", 0)
    out, err = capsys.readouterr()
    assert out == f"{TABLE.plain()}\n\na line\n"
    assert err == "a note\n[0/1] one\n"
