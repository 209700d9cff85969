"""Something around every function that is run for others, for who measures: `surround`.

A worker whose functions are not surrounded knows nothing of it: all that changes is which classes requests are made of,
as with `guarding`.

Rules
- It is around the function only: not around the unpickling of its arguments, nor around what is made of its result. Of
  a function that is answered later (`async_execution`, `async def`) it sees the beginning.
- Requests that were read before are run as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, TypeAlias

from farcall.agent.execution import FunctionJob, Workplace
from farcall.agent.jobs import Reply
from farcall.agent.returning import Returning

Around: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Makes what is around one function, in the thread that runs it. Neither it nor that may raise."""


def surround(place: Workplace, around: Around | None) -> None:
    """Has all functions that this agent runs for others run inside `around()` from now on; None: without it again."""
    call_job, remote_job, own_job = (_plain(job) for job in (place.call_job, place.remote_job, place.own_remote_job))
    if around is not None:
        call_job = _surrounded(call_job, around)
        remote_job = _surrounded(remote_job, around)
        own_job = _surrounded(own_job, around)
    place.call_job, place.remote_job, place.own_remote_job = call_job, remote_job, own_job


def _plain(job: Any) -> Any:
    return job.plain if issubclass(job, _Surrounded) else job


def _surrounded(job: type[FunctionJob], around: Around) -> Any:
    class Surrounded(_Surrounded, job):  # type: ignore[valid-type,misc]  # CallJob or RemoteJob, or what is made of them
        plain = job
        made = staticmethod(around)

    return Surrounded


class _Surrounded(FunctionJob):
    """A job whose function runs inside of something."""

    plain: type[FunctionJob]
    made: Around
    _inside: AbstractContextManager[object] | None
    _thread: int

    def run(self) -> Reply | None:
        """See `Job`."""
        self._inside = None
        self._thread = get_ident()
        if not self._body and (self._subject is None or self._subject.done()):
            self._enter()  # there are no arguments
        try:
            return super().run()
        finally:
            self._leave()

    def _enter(self) -> None:
        inside = self.made()
        inside.__enter__()
        self._inside = inside

    def _leave(self) -> None:
        if self._thread != get_ident():
            return  # another thread has its result before the thread that ran it has come out of it
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(None, None, None)

    def _arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        arguments = super()._arguments()
        self._enter()
        return arguments

    def _done(self, function: Callable[..., Any] | str, result: Any) -> Reply | Returning | None:
        self._leave()
        return super()._done(function, result)  # type: ignore[safe-super]  # that of the job

    def _failed(self, function: Any, error: BaseException) -> Reply | None:
        self._leave()
        return super()._failed(function, error)
