"""Does something at a point of the code at which a signal handler can run: raises, as Ctrl-C does, or calls.

Python runs signal handlers only when a function begins, when a call has returned from C, and when a loop starts over
(not when a function in Python returns: there is no look for signals between its last step and its caller's next). `At`
traces the files that are named, counts these points as the thread passes them, and calls `act` at the chosen ones. So
a test tries an interrupt at every point, and needs no luck. One only: Python ends the tracing when a tracer raises.

An exception is taken for raised by the instruction that a tracer stops at, a signal's by the call or jump before it.
Where these two stand under different handlers the point is left out: what happened there could not happen.

The points differ between versions of Python, and so do the handlers: on 3.13 the jump back to the condition of a
`while` loop is not covered by the `try` or `with` around the loop, though a signal handler can raise there
(CPython issue 130279). Code that must put something right after an interrupt has `while True` and a `break` instead.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any


class Interrupt(BaseException):
    """Comes from nowhere, as KeyboardInterrupt does."""


def interrupt() -> None:
    """What Ctrl-C does."""
    raise Interrupt


class At:
    """Within it, `act` is called at these points of the thread, numbered from 0."""

    def __init__(self, files: tuple[str, ...], points: tuple[int, ...], act: Callable[[], object] = interrupt) -> None:
        self._files = files
        self._points = points
        self._act = act
        self._called: set[int] = set()  # frames that have called a function in Python, and not gone on since
        self._last: dict[int, int] = {}  # frames, and the offset of the instruction that each has run last
        self.passed = 0
        """How many points were passed."""
        self.places: list[str] = []
        """Where it acted."""

    def __enter__(self) -> At:
        self._before = sys.gettrace()
        gc.disable()  # a collection would run finalizers of what other tests have left, and these are points, too
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        gc.enable()

    @property
    def has_acted(self) -> bool:
        """Whether all the points were there to act at."""
        return len(self.places) == len(self._points)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        self._called.add(id(frame.f_back))
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        self._last.pop(id(frame), None)
        frame.f_trace = self._trace_inside  # first: since 3.13 the next line does nothing for a frame without it
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "call":
            self._pass(frame)
        return self._trace_inside

    def _trace_inside(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            before, at = self._last.get(id(frame), -1), frame.f_lasti
            self._last[id(frame)] = at
            from_python = id(frame) in self._called
            self._called.discard(id(frame))
            if not from_python and _points_of(frame.f_code).has(before, at):
                self._pass(frame)
        return self._trace_inside

    def _pass(self, frame: FrameType) -> None:
        number = self.passed
        self.passed += 1
        if number in self._points:
            self.places.append(f"{frame.f_code.co_qualname}, line {frame.f_lineno}")
            self._act()


@dataclass
class _Points:
    """Where in a function signal handlers can run, by the offsets of instructions."""

    after_calls: set[tuple[int, int]]
    """A call, and what follows it."""
    targets: set[int]
    """Where loops start over: before 3.13, Python checks for signals when it has jumped there."""
    jumps: set[int]
    """The jumps that start a loop over: since 3.13, Python checks for signals before it jumps."""

    def has(self, before: int, at: int) -> bool:
        """Whether a signal handler can run at an instruction, if that one was run before it."""
        return (before, at) in self.after_calls or (at in self.targets and before >= at) or at in self.jumps


@cache
def _points_of(code: CodeType) -> _Points:
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> int:
        return next((entry.target for entry in table if entry.start <= offset < entry.end), -1)

    points = _Points(set(), set(), set())
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        if instruction.opname in ("CALL", "CALL_KW", "CALL_FUNCTION_EX"):
            # A tracer may stop at the prefixes of an instruction or at itself, depending on the version.
            for following in instructions[index + 1 :]:
                if handler(instruction.offset) == handler(following.offset):
                    points.after_calls.add((instruction.offset, following.offset))
                if following.opname != "EXTENDED_ARG":
                    break
        elif "_BACKWARD" in instruction.opname and "NO_INTERRUPT" not in instruction.opname:
            target = int(instruction.argval)
            if sys.version_info >= (3, 13):
                points.jumps.add(instruction.offset)
            elif handler(target - 2) == handler(target):
                points.targets.add(target)
    return points
