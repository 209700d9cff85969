"""Requests and replies at a worker that restricts what others may do (the option `allow`).

They are the jobs of `execution` and the replies of `calls` with a look at the list first. A worker without a list knows
nothing of them: which classes its requests are made of is decided once, when the agent is made.

Rules
- A function is judged by its name before it is looked up or its arguments are unpickled; a method by the class of its
  value, once that is there; a function that comes by value is refused. What cannot be judged does not run. What is
  unpickled, arguments and results, may name only what is allowed.
- Who was refused hears what; a line in the log says who wanted it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from farcall.agent.calls import Reply
from farcall.agent.execution import CallJob, FunctionJob, RemoteJob
from farcall.agent.jobs import Reply as Answer
from farcall.errors import NotAllowedError, RpcError, SerializationError
from farcall.futures import DONE, FAILED
from farcall.protocol.wire import FAILURE, METHOD
from farcall.security.allowed import Allowed
from farcall.serialization import (
    callable_name,
    decode_failure,
    loads_arguments_guarded,
    loads_guarded,
    not_rebuilt,
    offering,
    resolve_function,
)

logger = logging.getLogger("farcall")


def jobs_for(allow: Sequence[str] | None, worker: str) -> tuple[type[CallJob], type[RemoteJob]]:
    """What is made of the requests at the worker of that name with that list."""
    if allow is None:
        return CallJob, RemoteJob
    allowed = Allowed(allow, worker)

    class Call(_Guarded, CallJob):
        __slots__ = ()
        guard = allowed

    class Remote(_Guarded, RemoteJob):
        __slots__ = ()
        guard = allowed

    return Call, Remote


def reply_for(allow: Sequence[str] | None, worker: str) -> Callable[..., Reply]:
    """What is made of the replies at the worker of that name with that list."""
    return Reply if allow is None else partial(_GuardedReply, Allowed(allow, worker))


class _Guarded(FunctionJob):
    """A job that looks at the list first."""

    __slots__ = ()

    guard: Allowed

    def run(self) -> Answer | None:
        """See `Job`."""
        subject = self._subject
        if subject is not None and not subject.done():
            # Not left to the job: the value might come after the look at the list, and before the job's own.
            subject.watch(lambda _: self._place.serving.submit(self), waker=True, attended=True)
            return None
        try:
            self._check()
        except Exception as error:  # what could not be judged does not run
            return self._failed(None, error)
        return super().run()

    def _check(self) -> None:
        """Raises `NotAllowedError`; `SerializationError` if there is no such function."""
        callee, subject = self._callee, self._subject
        try:
            if not callee:
                self.guard.check_by_value()
            elif subject is None:
                module, _, name = callee.decode(errors="replace").partition("\0")
                self._check_function(module, name)
            elif callee[:1] == METHOD and not subject.failure:
                self.guard.check_method(subject.value(), self.kind[1:].decode(errors="replace"))
        except NotAllowedError as error:
            self._log(error)
            raise

    def _check_function(self, module: str, name: str) -> None:
        self.guard.check_function(module, name)
        outer, _, _ = name.rpartition(".")
        while outer:
            if not isinstance(resolve_function(f"{module}\0{outer}".encode(), self._place.worker), type):
                raise NotAllowedError(f"`{module}.{name}` is not allowed: it leads through something that is no class")
            outer, _, _ = outer.rpartition(".")
        self.guard.check_found(module, name, resolve_function(self._callee, self._place.worker))

    def _arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        body, buffers, handles = self._body, self._buffers, self._handles
        self._body, self._buffers, self._handles = b"", (), ()
        try:
            with offering(handles):
                return loads_arguments_guarded(body, buffers, self.guard)
        except NotAllowedError as error:
            self._log(error)
            raise
        except SerializationError as error:
            what = f"the arguments of `{self._name()}`"
            raise not_rebuilt(what, f"on worker {self._place.worker!r}", error.__cause__) from error.__cause__

    def _log(self, error: NotAllowedError) -> None:
        who = f"{self.origin}" if self.origin is not None else "another worker"
        logger.warning("worker %r refused a call of %s from %s: %s", self._place.worker, self._name(), who, error)


class _GuardedReply(Reply):
    """A reply of which only what is allowed is loaded."""

    __slots__ = ("_guard",)

    def __init__(self, guard: Allowed, *args: Any) -> None:
        super().__init__(*args)
        self._guard = guard

    def load(self) -> tuple[int, Any]:
        """See `Unloaded`."""
        if self._kind == FAILURE:
            return FAILED, decode_failure(self._body, lambda payload: loads_guarded(payload, (), self._guard))
        try:
            with offering(self._handles):
                return DONE, loads_guarded(self._body, self._buffers, self._guard)
        except (SerializationError, NotAllowedError) as error:
            what = f"the result of `{callable_name(self._function)}` from worker {self._worker!r}"
            wrapped: RpcError
            if isinstance(error, NotAllowedError):
                wrapped = NotAllowedError(f"{what} was refused here: {error}; or have it return plain data")
                wrapped.__cause__ = error
            else:
                wrapped = not_rebuilt(what, "here", error.__cause__)
                wrapped.__cause__ = error.__cause__
            return FAILED, wrapped
