"""What the serving pool runs, and where the reply goes: jobs as the pool sees them.

The pool knows nothing of calls. Requests, callbacks and chores are jobs because they have these members, and inherit
from nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from farcall.transports.base import Buffer

Reply: TypeAlias = bytes | Sequence[Buffer]
"""A small one in one piece, or the pieces of a large one."""


class Answerable(Protocol):
    """Where a reply goes."""

    @property
    def queue_answer(self) -> Callable[[bytes], None]:
        """Queues a small one for `flush_answers`. Never raises."""

    def answer(self, reply: Reply) -> None:
        """Sends it now. Never raises."""

    def flush_answers(self) -> None:
        """Sends what is queued. Never raises."""


class Job(Protocol):
    """Something to run."""

    @property
    def kind(self) -> object:
        """Jobs of one kind take about the same time: the name of the function."""

    @property
    def origin(self) -> Answerable | None:
        """Whom to answer."""

    @property
    def must_run(self) -> bool:
        """Whether it is to be run though the pool closes."""

    def run(self) -> Reply | None:
        """Runs it; the reply to send to `origin`, if there is one yet. Never raises, unless memory runs out or so."""


@runtime_checkable
class Awaited(Protocol):
    """A job whose outcome somebody waits for."""

    def failed(self, error: BaseException) -> Reply | None:
        """It raised after all; the reply that says so, if there is one."""


class AfterwardsJob:
    """What a function has left to be done when its reply has gone: all that waits goes first."""

    __slots__ = ("_chore", "_flush", "kind", "origin")

    must_run = False

    def __init__(self, chore: Callable[[], None], flush: Callable[[], None]) -> None:
        self.kind: object = "afterwards"
        self.origin: Answerable | None = None
        self._chore = chore
        self._flush = flush

    def run(self) -> None:
        """See `Job`."""
        self._flush()
        self._chore()
