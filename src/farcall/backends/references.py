"""What an `RRef` asks of an agent: the other half of the interface, for backends that have references.

An `RRef` is the face of a *handle*; handles are in a *book*, one for each agent; and what is asked of a handle's value
goes through the book's *calls*. A reference travels when an `RRef` is pickled: `serialization.collecting` gives the
handles that a message has met, and `offering` hands the other side's handles to the unpickler.

A backend without references keeps `NoReferences`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from farcall.errors import UsageError
from farcall.futures import Future
from farcall.protocol.ids import ForkId, RRefId, Worker, WorkerInfo

if TYPE_CHECKING:
    from farcall.agent.inventory import Inventory


class Known(Protocol):
    """A worker, as `ReferenceCalls.numbered` has it."""

    @property
    def info(self) -> WorkerInfo:
        """Who it is."""


class Handle(Protocol):
    """One handle of a reference on this worker. When it goes, the reference has one handle less."""

    @property
    def reference(self) -> RRefId:
        """Which reference, and who owns its value; equal for all handles of one reference."""

    @property
    def fork(self) -> ForkId | None:
        """Which handle of the reference; None at its owner."""

    @property
    def value(self) -> Future[Any] | None:
        """At the owner: the future of the value."""

    @property
    def confirmed(self) -> bool:
        """Whether the owner has counted it."""

    @property
    def book(self) -> Book:
        """Where it stands."""

    def check(self) -> None:
        """Raises `OwnerLost`, `ReferenceRefused` or `UsageError` if it leads nowhere."""


class ReferenceCalls(Protocol):
    """What is asked of values through their handles."""

    @property
    def info(self) -> WorkerInfo:
        """Who this worker is."""

    @property
    def numbered(self) -> Mapping[Any, Known]:
        """All workers, by the numbers that references know them by."""

    def call_on(
        self,
        handle: Any,
        what: bytes,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        unattended: bool = False,
    ) -> Future[Any]:
        """Calls a method of the value; or asks for itself, its presence or its type, by `what` of `protocol.wire`.

        Raises as `RpcAgent.call`, and as `Handle.check`.
        """

    def fetch(self, handle: Any, timeout: float) -> Any:
        """The value of a reference that another worker owns, a copy. Raises as `call_on`, and what made it fail."""

    def remote_on(self, handle: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Handle:
        """As `call_on`, for a method; the result stays with the owner. Raises as `call_on`."""

    def resolve_timeout(self, timeout: float) -> float:
        """The seconds that are meant by a `timeout` parameter; 0 is without end. Raises `UsageError`."""


class Book(Protocol):
    """The references of one agent."""

    @property
    def me(self) -> Worker:
        """The number of this worker, by which references know it."""

    @property
    def calling(self) -> ReferenceCalls:
        """By whom its handles are used."""

    def own(self, value: Any) -> Handle:
        """A reference to something that is here: what `RRef(value)` stands on."""

    def inventory(self) -> Inventory:
        """All that is owned and held here now. Raises nothing."""

    def debug_info(self) -> dict[str, str]:
        """Counters, by the names that torch gives them. Raises nothing."""

    def give_up_handles(self, reason: str) -> None:
        """Lets go of all handles of references that others own; using one raises `UsageError` from now on."""

    def forget(self, reason: str) -> None:
        """Lets all values go, and all handles; using one raises `UsageError` from now on."""


class NoReferences:
    """The book of an agent that has no references: empty, and stays so."""

    me: Worker = 0

    @property
    def calling(self) -> NoReturn:
        """There is nothing to call on."""
        raise self._refusal()

    def own(self, value: Any) -> NoReturn:
        """Raises `UsageError`."""
        raise self._refusal()

    def inventory(self) -> Inventory:
        """Of nothing."""
        from farcall.agent.inventory import Inventory  # not at the head: it is above this layer

        return Inventory((), ())

    def debug_info(self) -> dict[str, str]:
        """No counters."""
        return {}

    def give_up_handles(self, reason: str) -> None:
        """Does nothing."""

    def forget(self, reason: str) -> None:
        """Does nothing."""

    def _refusal(self) -> UsageError:
        return UsageError(
            "the backend of this worker has no references: use rpc_sync or rpc_async, or the default backend"
        )
