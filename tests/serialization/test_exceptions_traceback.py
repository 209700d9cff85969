from __future__ import annotations

import re
from types import CodeType
from typing import Any

import pytest

import farcall
from farcall.serialization.exceptions import format_frames


def fails() -> None:
    raise ValueError("x")


def recurses(depth: int) -> None:
    if depth == 0:
        fails()
    recurses(depth - 1)


def trace_of(function: Any, *args: Any) -> Any:
    with pytest.raises(ValueError, match="x") as caught:
        function(*args)
    return caught.value.__traceback__


def test_frames_are_shown_with_their_source() -> None:
    text = format_frames(trace_of(fails))
    assert re.search(rf'  File "{re.escape(__file__)}", line \d+, in fails\n    raise ValueError\("x"\)$', text)
    assert "in trace_of\n" in text


def test_no_traceback_is_empty() -> None:
    assert format_frames(None) == ""


def test_frames_of_the_package_itself_are_left_out() -> None:
    inside = farcall.__file__.replace("__init__", "agent/serving")
    namespace: dict[str, Any] = {}
    exec(compile("def serve(function):\n    function()\n", inside, "exec"), namespace)
    text = format_frames(trace_of(namespace["serve"], fails))
    assert "in fails" in text
    assert "in serve" not in text
    beside = inside.replace("farcall/agent", "farcall_model/agent")
    exec(compile("def serve(function):\n    function()\n", beside, "exec"), namespace)
    assert "in serve" in format_frames(trace_of(namespace["serve"], fails))


def test_a_long_traceback_loses_its_middle() -> None:
    trace = trace_of(recurses, 500)
    text = format_frames(trace)
    assert "\n  ... 423 frames left out ...\n" in text  # 1 + 501 + 1, less the first 20 and the last 60
    assert "in trace_of" in text
    assert text.endswith('raise ValueError("x")')


def test_frames_that_cannot_be_shown_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(fails)

    def fail(*args: Any, **kwargs: Any) -> CodeType:
        raise ZeroDivisionError

    monkeypatch.setattr("traceback.extract_tb", fail)
    text = format_frames(trace)
    monkeypatch.undo()  # before pytest needs it itself
    assert text == "  (its frames cannot be shown: ZeroDivisionError)"
