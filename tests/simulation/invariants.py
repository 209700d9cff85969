"""What must hold in every state of a simulation, by the names in `protocol/refcount.py` and `protocol/delivery.py`.

Each check sees the tables of all workers at once, as no worker of a real group can. It raises `BrokenInvariant`. Some
rules are the simulations' own:

- LAWFUL: what an honest program or worker does is never refused, and raises nothing.
- PROMISED: when nothing is under way, every handle is confirmed, refused or orphaned. A handle is refused only if a
  worker died.
- FORGED: what a dishonest worker says changes nothing for the others (`forgeries`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from farcall.protocol import refcount
from farcall.protocol.delivery import Delivery
from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.refcount import ForkState, ReferenceCounts
from farcall.protocol.reference_messages import ForkAccepted, ForkRefused, ForkRequest
from simulation.reference_state import is_forged

PENDING, CONFIRMED, REFUSED, ORPHANED = "pending", "confirmed", "refused", "orphaned"
"""What the program of a worker knows about a handle."""


class HandleStatus(NamedTuple):
    """A handle that the program of a worker has."""

    reference: RRefId
    fork: ForkId | None
    status: str


class Observed(Protocol):
    """A worker of a simulation, as the checks see it."""

    me: Worker
    alive: bool
    counts: ReferenceCounts
    lost: set[Worker]
    """The workers of whose death it knows."""
    is_dishonest: bool
    """It has claimed what it has no right to. Nothing is promised to it."""

    @property
    def delivery(self) -> Delivery[Any]:
        """Returns the numbered messages between this worker and the others."""

    def handle_statuses(self) -> Iterable[HandleStatus]:
        """Returns the handles of the program."""


Workers = Mapping[Worker, Observed]


class BrokenInvariant(AssertionError):
    """An invariant does not hold. `invariant` is its name, `schedule` the steps that led there, where known."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant
        self.schedule: list[tuple[str | int, ...]] = []


def check_live(workers: Workers) -> None:
    """LIVE: the owner counts every fork that its holder takes for confirmed, so it keeps the value."""
    for worker in workers.values():
        if not worker.alive:
            continue
        for fork, held in worker.counts.held.items():
            if held.state is ForkState.CONFIRMED:
                owner = workers[held.reference.owner]
                owned = owner.counts.owned.get(held.reference)
                if owner.alive and (owned is None or owned.forks.get(fork) != worker.me):
                    raise BrokenInvariant(
                        "LIVE", f"worker {worker.me} has {fork} of {held.reference} confirmed, and nobody counts it"
                    )


def check_unreported(workers: Workers) -> None:
    """UNREPORTED: no value is released while an unreported fork lives, and all workers through which it came."""
    for worker in workers.values():
        if worker.alive:
            for fork in worker.counts.unreported:
                _check_parents(workers, worker, fork)


def _check_parents(workers: Workers, holder: Observed, fork: ForkId) -> None:
    """Checks that the parent waits for the fork, and so on, up to a parent that is not unreported itself."""
    at = holder
    while (held := at.counts.held.get(fork)) is not None and held.state is ForkState.UNREPORTED:
        assert held.parent is not None
        at = workers[held.parent]
        if not at.alive:
            return  # the holder will hear of it, and ask the owner
        parent = at.counts.parents.get(fork)
        if parent is None:
            if held.reference.owner not in at.lost and not any(each.lost for each in workers.values()):
                raise BrokenInvariant("UNREPORTED", f"worker {at.me} does not wait for {fork} of {held.reference}")
            return  # the parent was refused or orphaned, because a worker died; so will this fork be
        fork = parent
    if held is not None and (held.state is ForkState.CONFIRMED or all(each.alive for each in workers.values())):
        owner = workers[held.reference.owner]
        if owner.alive and _is_released(owner, held.reference):
            raise BrokenInvariant(
                "UNREPORTED", f"{held.reference} was released, and worker {holder.me} has an unreported fork of it"
            )


def _is_released(owner: Observed, reference: RRefId) -> bool:
    created = owner.counts.workers.get(reference.creator)
    return reference not in owner.counts.owned and created is not None and reference.number in created


def check_answered(workers: Workers) -> None:
    """ANSWERED: every requested fork has a request or an answer under way, or a request that the owner has noted."""
    for worker in workers.values():
        if worker.alive:
            for fork, held in worker.counts.held.items():
                if held.state is ForkState.REQUESTED and not _is_answered(workers, worker, held.reference, fork):
                    raise BrokenInvariant(
                        "ANSWERED", f"worker {worker.me} waits for an answer about {fork} of {held.reference}"
                    )


def _is_answered(workers: Workers, worker: Observed, reference: RRefId, fork: ForkId) -> bool:
    owner = workers[reference.owner]
    if not owner.alive:
        return True  # the loss of the owner settles it
    for number, message in worker.delivery.unacknowledged(owner.me):
        # A request to create the reference is answered by its acknowledgement.
        is_over = isinstance(message, ForkRequest) and _has_received(owner, worker.me, number)
        if getattr(message, "fork", None) == fork and not is_over:
            return True
    for number, message in owner.delivery.unacknowledged(worker.me):
        is_answer = isinstance(message, ForkAccepted | ForkRefused) and message.fork == fork
        if is_answer and not _has_received(worker, owner.me, number):
            return True
    owned = owner.counts.owned.get(reference)
    is_noted = owned is not None and not owned.created and owned.forks.get(fork) == worker.me
    return is_noted and reference.creator not in owner.lost


def _has_received(worker: Observed, sender: Worker, number: int) -> bool:
    link = worker.delivery.links.get(sender)
    return link is not None and number in link.received


def check_settled(worker: Observed) -> None:
    """SETTLED: no table of a worker keeps anything of a worker of whose loss it knows. D3: nor does its delivery."""
    if not worker.lost or not worker.alive:
        return
    lost, counts = worker.lost, worker.counts
    for reference, owned in counts.owned.items():
        if not owned.created and not owned.refused and reference.creator in lost:
            _unsettled(worker, f"waits for the creator of {reference}")
        if not lost.isdisjoint(owned.forks.values()):
            _unsettled(worker, f"counts a fork of {reference} that nobody holds")
    for fork, held in counts.held.items():
        if held.reference.owner in lost:
            _unsettled(worker, f"holds {fork} of {held.reference}")
        if held.parent in lost:
            _unsettled(worker, f"means to tell the parent of {fork}")
        if not lost.isdisjoint(held.children.values()):
            _unsettled(worker, f"waits for a child of {fork}")
    for table in (counts.workers, counts.numbers, counts.claims):
        if not lost.isdisjoint(table):
            _unsettled(worker, "counts it among the workers")
    for peer in lost:
        if worker.delivery.unacknowledged(peer):
            raise BrokenInvariant("D3", f"worker {worker.me} keeps messages for worker {peer}, which is lost")


def _unsettled(worker: Observed, what: str) -> None:
    raise BrokenInvariant("SETTLED", f"worker {worker.me} knows that {sorted(worker.lost)} are lost, and {what}")


def check_kept(sender: Observed, receiver: Observed) -> None:
    """D2: what its receiver has not taken is kept by its sender."""
    sent, received = sender.delivery.links.get(receiver.me), receiver.delivery.links.get(sender.me)
    if sent is None or received is None or sent.last == received.received.mark:
        return
    for number in range(received.received.mark + 1, sent.last + 1):
        if number not in received.received and number not in sent.unacknowledged:
            raise BrokenInvariant(
                "D2", f"worker {sender.me} forgot its message {number} to worker {receiver.me}, not yet taken"
            )


def check_claims(worker: Observed) -> None:
    """FORGED: claims are counted and limited, and refused once the creator has created another reference."""
    counts = worker.counts
    noted = [reference for named in counts.noted.values() for reference in named]
    if sum(counts.claims.values()) != len(noted) or any(each > refcount.MAX_CLAIMS for each in counts.claims.values()):
        raise BrokenInvariant("FORGED", f"worker {worker.me} has noted {noted}, and counts {counts.claims}")
    for reference in (*counts.owned, *noted):
        if is_forged(reference):
            created = counts.workers.get(reference.creator)
            owned = counts.owned.get(reference)
            if (created is None or reference.number in created) and not (owned is not None and owned.refused):
                raise BrokenInvariant(
                    "FORGED", f"worker {worker.me} keeps what was claimed of {reference} with a wrong token"
                )


def check_rest(workers: Workers, deaths: int) -> None:
    """PROMISED: nothing is under way, so everything is decided; and nothing was refused unless a worker died."""
    for worker in workers.values():
        if not worker.alive:
            continue
        for reference, _, status in worker.handle_statuses():
            owner = workers[reference.owner]
            what = f"worker {worker.me} has a {status} handle of {reference}"
            if status is PENDING:
                raise BrokenInvariant("PROMISED", f"{what}, and nothing is under way")
            if status is ORPHANED and owner.alive:
                raise BrokenInvariant("PROMISED", f"{what}, whose owner lives")
            if status is REFUSED and not deaths and not worker.is_dishonest:
                raise BrokenInvariant("PROMISED", f"{what}, and nobody died")
            if status is CONFIRMED and not owner.alive:
                raise BrokenInvariant("PROMISED", f"{what}, whose owner is dead")
            owned = owner.counts.owned.get(reference)
            if status is CONFIRMED and (owned is None or not (owned.created or owned.refused)):
                raise BrokenInvariant("PROMISED", f"{what}, and its owner has no value")


def check_empty(workers: Workers) -> None:
    """EMPTY: all handles are gone and nothing is under way, so every table is empty. Only forged claims may be left."""
    for worker in workers.values():
        if not worker.alive:
            continue
        counts = worker.counts
        check_claims(worker)
        claimed = {key for key, named in counts.noted.items() if all(map(is_forged, named))}
        left: dict[str, Collection[object]] = {
            "owned": [reference for reference in counts.owned if not is_forged(reference)],
            "held": counts.held,
            "unreported": counts.unreported,
            "pending children": counts.parents,
            "noted": counts.noted.keys() - claimed,
        }
        for table, content in left.items():
            if content:
                raise BrokenInvariant("EMPTY", f"worker {worker.me} still has {table}: {', '.join(map(str, content))}")
        if not counts.is_empty() and not claimed:
            raise BrokenInvariant("EMPTY", f"worker {worker.me} says that it is not empty")
