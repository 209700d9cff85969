"""A service with a list: what a worker exposes in the tests, and what it must not."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import farcall

ran: list[Any] = []


def predict(value: Any) -> Any:
    ran.append(value)
    return value


def _private(value: Any) -> Any:
    ran.append(value)
    return value


class Model:
    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def step(self, value: int) -> int:
        return self.factor * value

    def _tune(self) -> str:
        return "tuned"

    @staticmethod
    def helper() -> str:
        return "helped"


@farcall.exposed
def marked(value: Any) -> Any:
    return value


@farcall.exposed
class Marked:
    def step(self) -> str:
        return "stepped"


class Partly:
    @farcall.exposed
    def open(self) -> str:
        return "open"

    def closed(self) -> str:
        return "closed"


class Bomb:
    """Runs something while it is unpickled."""

    def __reduce__(self) -> Any:
        return _explode, ("bang",)


def _explode(what: str) -> str:
    ran.append(what)
    return what


system = os.system
run = subprocess.run
