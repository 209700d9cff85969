"""The text of a traceback, for the note that an exception carries to another worker.

Frames of farcall itself are left out: a person looks for the own function. Long tracebacks lose their middle.
"""

from __future__ import annotations

import os
import traceback
from types import TracebackType
from typing import Final

_OWN_CODE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_FIRST: Final = 20
_LAST: Final = 60


def format_frames(trace: TracebackType | None) -> str:
    """The frames with their source lines, no line break at the end. Empty if there are none. Never raises."""
    try:
        return _format(trace)
    except Exception as error:  # a loader that fails to give its source, for example
        return f"  (its frames cannot be shown: {type(error).__name__})"


def _format(trace: TracebackType | None) -> str:
    levels = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OWN_CODE):
            levels.append(trace)
        trace = trace.tb_next
    left_out = len(levels) - _FIRST - _LAST
    if left_out <= 0:
        return _lines(levels)
    return f"{_lines(levels[:_FIRST])}\n  ... {left_out} frames left out ...\n{_lines(levels[-_LAST:])}"


def _lines(levels: list[TracebackType]) -> str:
    frames = [frame for level in levels for frame in traceback.extract_tb(level, limit=1)]
    return "".join(traceback.format_list(frames)).rstrip("\n")
