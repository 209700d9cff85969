"""Every error that farcall raises of its own.

    RpcError (RuntimeError)              the root: programs written for torch catch RuntimeError
    ├── UsageError                       the call itself was wrong; nothing was sent, nothing has changed
    │   ├── NotInitializedError          no init_rpc yet, or shut down already
    │   ├── AlreadyInitializedError      a second init_rpc without a shutdown between
    │   ├── ForkedProcessError           a forked child used its parent's agent
    │   ├── UnknownWorkerError           no worker of that name or rank in the group
    │   ├── BackendError                 (TypeError) no such backend, or options that are not of it
    │   ├── DeviceError                  (ValueError) no device, or a device map that cannot be turned round
    │   └── SerializationError           (TypeError) an argument or result cannot be pickled
    ├── ExpelledError                    the group has taken this worker for dead; join it again
    ├── RpcTimeoutError                  (TimeoutError) the time of a call is over
    ├── WorkerLost                       (ConnectionError) the other worker died or cannot be reached
    │   └── OwnerLost                    ... and a reference whose value it had was used
    ├── ReferenceRefused                 a reference was used whose value is gone, as who passed it on has died
    ├── NotAllowedError                  the callee does not let others call that, or load that
    ├── RemoteError                      the callee raised something that cannot be rebuilt here
    ├── RendezvousError                  the workers did not find each other
    │   └── RendezvousTimeoutError       (TimeoutError) ... in time
    ├── ShutdownError                    a graceful shutdown ended without everybody
    └── ProtocolError                    (ConnectionError) the other end does not speak our protocol
        ├── VersionMismatchError         ... or speaks another version of it
        └── ConnectionRefusedByPeer      ... or does not want to talk to us, and said why
            └── AuthenticationError      ... as one of the two does not know the group's secret
                └── EncryptionError      ... or a certificate is no good, or only one of the two encrypts

Rules: a message says who (the worker's name), what (the function, the argument) and what to do next. An error raised
by a *user's* function is none of these: it arrives with its own type.
"""

from __future__ import annotations


class RpcError(RuntimeError):
    """The root of all errors that farcall itself raises."""


class UsageError(RpcError):
    """The call was wrong; nothing was sent and nothing has changed."""


class NotInitializedError(UsageError):
    """There is no agent: `init_rpc` was not called, or `shutdown` was."""


class AlreadyInitializedError(UsageError):
    """`init_rpc` was called while an agent is running."""


class ForkedProcessError(UsageError):
    """A forked child used the agent of its parent."""


class UnknownWorkerError(UsageError):
    """The group has no worker of that name or rank."""


class BackendError(UsageError, TypeError):
    """There is no such backend, or it cannot be used as it was asked for: with options that are not of it, say."""


class DeviceError(UsageError, ValueError):
    """Something is no device, or a device map cannot be turned round."""


class SerializationError(UsageError, TypeError):
    """An argument or a result cannot be turned into bytes."""


class ExpelledError(RpcError):
    """The others have taken this worker for dead: it was silent for too long. It must shut down, and may join again."""


class RpcTimeoutError(RpcError, TimeoutError):
    """The time of a call is over; its reply, should it still come, is dropped."""


class WorkerLost(RpcError, ConnectionError):
    """The other worker died, or cannot be reached."""

    def __init__(self, message: str, worker: str | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        """The name of the worker that was lost, if it is known."""
        self.is_gone = False
        """Nobody listens any more where it did, as far as can be trusted: its process has ended."""


class OwnerLost(WorkerLost):
    """The owner of a reference was lost, and the value with it."""


class ReferenceRefused(RpcError):
    """The value of a reference is gone: the worker that passed it on died before the owner could count it."""


class NotAllowedError(RpcError):
    """A worker restricts what others may call there, or load (the option `allow`), and this is not on its list."""


class RemoteError(RpcError):
    """The callee raised something that cannot be rebuilt here.

    It carries what is known of it as text: `type_name`, `message` and `traceback`.
    """

    def __init__(self, message: str, type_name: str = "", remote_message: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.message = remote_message
        self.traceback = traceback


class RendezvousError(RpcError):
    """The workers did not find each other."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Not all workers came in time; the message says who came and who did not."""

    def __init__(self, message: str, present: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.present = present
        """The keys of the store that were there when the time was over."""


class ShutdownError(RpcError):
    """A graceful shutdown ended without everybody; the message says who was missing. All is closed here."""


class ProtocolError(RpcError, ConnectionError):
    """What came over a connection is not what our protocol says."""


class VersionMismatchError(ProtocolError):
    """The other end speaks another version of the protocol."""


class ConnectionRefusedByPeer(ProtocolError):
    """The other end does not want this connection, and said why."""


class AuthenticationError(ConnectionRefusedByPeer):
    """One end of a connection does not know the secret of the other's group."""


class EncryptionError(AuthenticationError):
    """The two ends of a connection do not agree on its encryption: one refuses the other's certificate, or does not
    encrypt though the other does."""
