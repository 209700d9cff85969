"""Systems that do nothing, and ends that answer as they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from farcall.bench.farcall_rpc import OWN
from farcall.bench.findings import Findings
from farcall.bench.processes import EndpointFailed
from farcall.bench.system import System
from systems import PEERS

TORCH = PEERS["torch"]
PYRO5 = PEERS["pyro5"]


class FakeEnds:
    """In place of processes: `answer` is asked, and may raise EndpointFailed. Notes what was opened."""

    def __init__(self, answer: Callable[[System, str, dict[str, Any]], Any]) -> None:
        self._answer = answer
        self.opened: list[tuple[str, str]] = []
        self.cannot_start: set[str] = set()
        self.cannot_stop: set[str] = set()

    @contextmanager
    def open(self, system: System, part: str) -> Iterator[Any]:
        self.opened.append((system.name, part))
        if system.name in self.cannot_start:
            raise EndpointFailed("a traceback\nof two lines", "no such device")
        ends = self

        class MeasuredEnd:
            def ask(self, command: str, **options: Any) -> Any:
                return ends._answer(system, command, options)

        yield MeasuredEnd()
        if system.name in self.cannot_stop:
            raise EndpointFailed("it hangs")


def found_beside(*systems: System) -> Findings:
    """Findings of farcall and these, with nothing in them."""
    return Findings(systems=[OWN, *systems])
