"""The exceptions that farcall itself raises.

    RpcError (RuntimeError)              the root; programs written for torch catch RuntimeError
    ├── UsageError                       the arguments or the order of calls is wrong; nothing was sent or changed
    │   ├── NotInitializedError          init_rpc was not called, or shutdown was
    │   ├── AlreadyInitializedError      init_rpc was called twice without a shutdown in between
    │   ├── ForkedProcessError           a forked child used the agent of its parent
    │   ├── UnknownWorkerError           the group has no worker of that name or rank
    │   ├── BackendError                 (TypeError) the backend does not exist, or got options that are not its own
    │   ├── DeviceError                  (ValueError) a device or a device map is not valid
    │   └── SerializationError           (TypeError) an argument or result cannot be pickled
    ├── ExpelledError                    the group has declared this worker lost; it can join again
    ├── RpcTimeoutError                  (TimeoutError) the timeout of a call has expired
    ├── CallCancelledError               (concurrent.futures.CancelledError) the call was cancelled
    ├── WorkerLostError                  (ConnectionError) the other worker died or cannot be reached
    │   └── OwnerLostError               ... and it owned the value of the reference that was used
    ├── ReferenceRefusedError            the owner does not have the value of a reference any more
    ├── NotAllowedError                  the callee does not allow others to call or send this
    ├── RemoteError                      the callee raised an exception that cannot be rebuilt here
    ├── RendezvousError                  the workers did not find each other
    │   └── RendezvousTimeoutError       (TimeoutError) ... within the timeout
    ├── ShutdownError                    a graceful shutdown ended before all workers were done
    └── ProtocolError                    (ConnectionError) the other end of a connection broke farcall's protocol
        ├── VersionMismatchError         ... or speaks another version of it
        └── PeerRefusedError             ... or refused the connection, and said why
            └── AuthenticationError      ... because the two ends do not have the same secret
                └── EncryptionError      ... or because they do not agree on TLS
    GroupCallError (ExceptionGroup)      some workers of a call on a selection failed. No RpcError: its members may be
                                         exceptions of the program

Rules
- A message names the worker, says what went wrong with which function or argument, and says what to do next.
- An exception raised by a user's function is none of these: it arrives at the caller with its own type.
- All names end in `Error`. The earlier names of four of them (`WorkerLost` ...) are aliases.
"""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every class that stands in this module at run time is an error
    from collections.abc import Mapping, Sequence
    from typing import Any, Self


class RpcError(RuntimeError):
    """The base class of all exceptions that farcall itself raises: `except RpcError` catches all of them.

    Its only argument is the message. An exception that a function raised on another worker is not one of these. It
    arrives with its own type, or as a `RemoteError` if it cannot be rebuilt.
    """


class UsageError(RpcError):
    """A function of farcall was called with wrong arguments or at the wrong time. Nothing was sent or changed."""


class NotInitializedError(UsageError):
    """This process has no agent, because `init_rpc` was not called yet or `shutdown` was called already.

    Also raised if the process is in several groups, and it is not known which of them is meant.
    """


class AlreadyInitializedError(UsageError):
    """`init_rpc` was called while this process already has an agent, or a `Group` was entered twice.

    Shut down first.
    """


class ForkedProcessError(UsageError):
    """A forked child used the agent of its parent, whose threads and connections do not exist in the child."""


class UnknownWorkerError(UsageError):
    """A call names a worker that is not in the group. The message lists the workers that are."""


class BackendError(UsageError, TypeError):
    """The backend does not exist, does not do what a backend must do, or got options that are not its own."""


class DeviceError(UsageError, ValueError):
    """A value is not a device, or a device map sends two devices to the same device."""


class SerializationError(UsageError, TypeError):
    """An argument or a result cannot be pickled. The message says which part of it and why."""


class ExpelledError(RpcError):
    """The group has declared this worker lost, because it did not answer for too long, although it still runs.

    Every further call raises this error. Call `shutdown(graceful=False)` and then `init_rpc` to join again.
    """


class RpcTimeoutError(RpcError, TimeoutError):
    """The timeout of a call has expired. The callee was told to stop; a late reply is discarded.

    Args:
        message: The text of the exception.
        started: See the attribute.

    Attributes:
        started: Whether the function had begun to run at the callee. None if that is not known, for example because
            the callee did not answer.
    """

    def __init__(self, message: str, started: bool | None = None) -> None:
        super().__init__(message)
        self.started = started


class CallCancelledError(RpcError, concurrent.futures.CancelledError):
    """The call that was waited for was cancelled: by `Future.cancel`, or with the code that it was made for.

    Not an `asyncio.CancelledError`, which is for code that is itself cancelled.
    """


class WorkerLostError(RpcError, ConnectionError):
    """The other worker died or cannot be reached.

    Args:
        message: The text of the exception.
        worker: The name of the lost worker; None if it is not known. Not checked.

    Attributes:
        worker: The name of the lost worker, or None.
        is_gone: True if nothing listens at the addresses of the worker, so its process has most likely ended. False if
            it may still run. The constructor sets False, and the code that raises the exception may set True.
    """

    def __init__(self, message: str, worker: str | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.is_gone = False


class OwnerLostError(WorkerLostError):
    """The worker that owns the value of a reference was lost, and the value with it.

    Args:
        message: The text of the exception.
        worker: The name of the owner; None if it is not known.
    """


class ReferenceRefusedError(RpcError):
    """The owner of a reference does not have its value any more, or never counted this copy of the reference.

    The usual cause: the worker that passed the reference on died before the owner had counted the copy.
    """


class NotAllowedError(RpcError):
    """The callee has an allow-list (the option `allow`), and the function called or the type sent is not on it."""


class RemoteError(RpcError):
    """The callee raised an exception that cannot be rebuilt on the caller, for example because its class is missing.

    Args:
        message: The text of this exception, which `str()` returns.
        type_name: The full name of the class of the original exception; empty if unknown.
        remote_message: The text of the original exception; empty if unknown. It becomes the attribute `message`.
        traceback: The traceback on the callee, as text; empty if unknown.

    Attributes:
        type_name: The argument `type_name`.
        message: The argument `remote_message`, not the argument `message`.
        traceback: The argument `traceback`.
    """

    def __init__(self, message: str, type_name: str = "", remote_message: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.message = remote_message
        self.traceback = traceback


class RendezvousError(RpcError):
    """The workers did not find each other: the rendezvous address is wrong, in use or not reachable."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """The rendezvous took longer than its timeout: the store or some workers were missing. The message says which ones.

    Args:
        message: The text of the exception.
        present: The keys that were there when `Store.collect` timed out. Empty if there were none, or if something else
            timed out.

    Attributes:
        present: The argument `present`.
    """

    def __init__(self, message: str, present: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.present = present


class ShutdownError(RpcError):
    """Waiting for all workers to finish their work failed. The message says which workers or calls were missing.

    Raised by `shutdown(graceful=True)`, which leaves the group and releases all resources all the same, and by
    `RpcAgent.join`, after which the worker is still in the group.
    """


class ProtocolError(RpcError, ConnectionError):
    """The other end of a connection sent bytes that are not valid in farcall's protocol, the format of its messages."""


class VersionMismatchError(ProtocolError):
    """The other end of a connection speaks another version of farcall's protocol. Install one version everywhere."""


class PeerRefusedError(ProtocolError):
    """The other end refused the connection during the handshake. The message quotes its reason."""


class AuthenticationError(PeerRefusedError):
    """The two ends of a connection do not have the same secret, so they belong to different groups."""


class EncryptionError(AuthenticationError):
    """The two ends of a connection do not agree on TLS.

    One end does not accept the certificate of the other, or one end encrypts and the other does not.
    """


class GroupCallError(ExceptionGroup[Exception]):
    """A call on several workers failed on some of them. `except* WorkerLostError` catches a part of it.

    Not an `RpcError`, because its members may be exceptions of the program.

    Args:
        message: The text of the exception.
        errors: The exceptions by worker name; at least one.
        results: The results of the workers that had answered by then, by worker name.

    Attributes:
        results: The results that were there by then, by worker name.
    """

    _names: tuple[str, ...]
    results: dict[str, Any]

    def __new__(cls, message: str, errors: Mapping[str, Exception], results: Mapping[str, Any] | None = None) -> Self:
        self = super().__new__(cls, message, list(errors.values()))
        # Names, not a second table of the exceptions: a failure that travels rebuilds `exceptions` and the attributes,
        # and the two would be different objects.
        self._names = tuple(errors)
        self.results = dict(results or {})
        return self

    def __init__(self, message: str, errors: Mapping[str, Exception], results: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, list(errors.values()))

    @property
    def errors(self) -> dict[str, Exception]:
        """The exceptions by worker name. Calls that were cancelled because of them are not in it."""
        return dict(zip(self._names, self.exceptions, strict=False))

    def derive(self, excs: Sequence[Exception], /) -> GroupCallError:  # type: ignore[override]
        """Returns an error with a part of the exceptions, under the names of their workers. `except*` uses it."""
        names = {id(error): name for name, error in self.errors.items()}
        left = [name for name in self._names if self.errors[name] not in excs]
        # A member that is a group itself is a new object here, with a part of its own members.
        found = [names[id(error)] if id(error) in names else _take_group(left, self.errors, error) for error in excs]
        return GroupCallError(self.message, dict(zip(found, excs, strict=True)), self.results)

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupCallError, (self.message, self.errors, self.results)


def _take_group(names: list[str], errors: Mapping[str, Exception], part: BaseException) -> str:
    """Returns the name of the member of `errors` that `part` is a part of, and removes it from `names`.

    Returns a number as text if there is none, as for an exception that is not of this group.
    """
    members = {id(each) for each in part.exceptions} if isinstance(part, BaseExceptionGroup) else set()
    for name in names:
        whole = errors[name]
        if isinstance(whole, BaseExceptionGroup) and not members.isdisjoint(map(id, whole.exceptions)):
            names.remove(name)
            return name
    return f"{id(part):x}"


# The names that these had before all of them ended in `Error`. Programs may use them.
WorkerLost = WorkerLostError
OwnerLost = OwnerLostError
ReferenceRefused = ReferenceRefusedError
ConnectionRefusedByPeer = PeerRefusedError
