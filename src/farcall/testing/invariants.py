"""What must hold in every state of a simulation, by the names in `protocol/references.py` and `protocol/delivery.py`.

Each check looks at the workers from above, as nobody in a real group can, and raises `BrokenInvariant`. LAWFUL and
PROMISED are the simulation's own: what the program may do is never refused by the protocol, and when nothing is under
way any more, every handle is confirmed, refused or orphaned, and refused only if somebody died.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.reference_tables import Standing
from farcall.testing.simulated_workers import CONFIRMED, ORPHANED, PENDING, REFUSED, SimulatedWorker

Workers = Mapping[Worker, SimulatedWorker]


class BrokenInvariant(AssertionError):
    """An invariant does not hold. `invariant` is its name, `schedule` the steps that led there, where known."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant
        self.schedule: list[tuple[str | int, ...]] = []


def check_live(workers: Workers) -> None:
    """LIVE: no value is released while a confirmed handle of it lives."""
    for worker in workers.values():
        if worker.alive:
            for handle in worker.handles.values():
                if handle.standing is CONFIRMED:
                    check_not_released(workers, worker.me, handle.reference)


def check_lent(workers: Workers) -> None:
    """LENT: nor while one lives that is lent, if all do through whose hands it came from one that is confirmed."""
    for worker in workers.values():
        if worker.alive:
            for fork in worker.references.lent:
                _check_lender(workers, worker, fork)


def _check_lender(workers: Workers, holder: SimulatedWorker, fork: ForkId) -> None:
    """Its parent waits for a word about it, and so on, up to one that is not lent."""
    at = holder
    while (held := at.references.held.get(fork)) is not None and held.standing is Standing.LENT:
        assert held.parent is not None
        at = workers[held.parent]
        if not at.alive:
            return  # the holder will be told, and ask
        parent = at.references.parents.get(fork)
        if parent is None and held.reference.owner not in at.lost and not any(w.lost for w in workers.values()):
            raise BrokenInvariant("LENT", f"worker {at.me} does not know that it lent {fork} of {held.reference}")
        if parent is None:
            return  # refused or orphaned, because somebody died; and so will this one be
        fork = parent
    if held is not None and (held.standing is Standing.CONFIRMED or all(w.alive for w in workers.values())):
        owner = workers[held.reference.owner]
        if owner.alive and _is_gone(owner, held.reference):
            raise BrokenInvariant("LENT", f"{held.reference} was released, and was lent to worker {holder.me}")


def check_not_released(workers: Workers, holder: Worker, reference: RRefId) -> None:
    """LIVE, for one confirmed handle."""
    owner = workers[reference.owner]
    if owner.alive and _is_gone(owner, reference):
        raise BrokenInvariant("LIVE", f"{reference} was released, and worker {holder} has a confirmed handle of it")


def _is_gone(owner: SimulatedWorker, reference: RRefId) -> bool:
    """Whether its value was released, and no error stands in its place.

    One does for whoever gets it from the owner, to whom it came back, from one who was lent it by a dead one.
    """
    return reference in owner.released and reference not in owner.refused


def check_answered(workers: Workers, alive: Iterable[SimulatedWorker], asked: Collection[ForkId]) -> None:
    """ANSWERED: every handle that is not confirmed has a request or an answer under way, or is noted at the owner.

    `asked` holds the forks about which a request or an answer is under way. A request to make a reference is answered
    by its acknowledgement, which is under way as long as it is kept.
    """
    for worker in alive:
        for fork, held in worker.references.held.items():
            if held.standing is not Standing.UNCONFIRMED or fork in asked:
                continue
            reference = held.reference
            owner = workers[reference.owner]
            if not owner.alive:
                continue  # the loss of the owner will settle it
            if fork.creator == worker.me and fork in worker.creations_to_confirm(reference.owner):
                continue
            owned = owner.references.owned.get(reference)
            if owned is None or owned.created or owned.forks.get(fork) != worker.me or reference.creator in owner.lost:
                if worker.has_to_say(fork) or owner.has_to_say(fork):
                    continue
                raise BrokenInvariant("ANSWERED", f"worker {worker.me} waits for an answer about {fork} of {reference}")


def check_settled(worker: SimulatedWorker) -> None:
    """SETTLED: no table of a worker keeps anything of a worker of whose loss it knows. D3: nor does its delivery."""
    if not worker.lost or not worker.alive:
        return
    lost, references = worker.lost, worker.references
    for reference, owned in references.owned.items():
        if not owned.created and not owned.refused and reference.creator in lost:
            _unsettled(worker, f"waits for the creator of {reference}")
        if not lost.isdisjoint(owned.forks.values()):
            _unsettled(worker, f"counts a fork of {reference} that nobody holds")
    for fork, held in references.held.items():
        if held.reference.owner in lost:
            _unsettled(worker, f"holds {fork} of {held.reference}")
        if held.parent in lost:
            _unsettled(worker, f"means to tell the parent of {fork}")
        if not lost.isdisjoint(held.children.values()):
            _unsettled(worker, f"waits for a child of {fork}")
    for table in (references.peers, references.numbers):
        if not lost.isdisjoint(table):
            _unsettled(worker, "counts it among its peers")
    for peer in lost:
        if worker.delivery.unacknowledged(peer):
            raise BrokenInvariant("D3", f"worker {worker.me} keeps messages for worker {peer}, which is lost")


def _unsettled(worker: SimulatedWorker, what: str) -> None:
    raise BrokenInvariant("SETTLED", f"worker {worker.me} knows that {sorted(worker.lost)} are lost, and {what}")


def check_kept(sender: SimulatedWorker, to: Worker, not_taken: Iterable[int]) -> None:
    """D2: what its receiver has not taken is kept by its sender."""
    kept = {number for number, _ in sender.delivery.unacknowledged(to)}
    for number in not_taken:
        if number not in kept:
            raise BrokenInvariant("D2", f"worker {sender.me} forgot its message {number} to worker {to}, not yet taken")


def check_rest(workers: Workers, deaths: int) -> None:
    """PROMISED: nothing is under way, so everything is decided; and nothing was refused unless somebody died."""
    for worker in workers.values():
        if not worker.alive:
            continue
        for handle in worker.handles.values():
            reference, owner = handle.reference, workers[handle.reference.owner]
            what = f"worker {worker.me} has a {handle.standing} handle of {reference}"
            if handle.standing is PENDING:
                raise BrokenInvariant("PROMISED", f"{what}, and nothing is under way")
            if handle.standing is ORPHANED and owner.alive:
                raise BrokenInvariant("PROMISED", f"{what}, whose owner lives")
            if handle.standing is REFUSED and not deaths:
                raise BrokenInvariant("PROMISED", f"{what}, and nobody died")
            if handle.standing is CONFIRMED and not owner.alive:
                raise BrokenInvariant("PROMISED", f"{what}, whose owner is dead")
            if handle.standing is CONFIRMED and reference not in owner.values and reference not in owner.refused:
                raise BrokenInvariant("PROMISED", f"{what}, and its owner has no value")


def check_empty(workers: Workers) -> None:
    """EMPTY: all handles are gone and nothing is under way, so every table is empty."""
    for worker in workers.values():
        if not worker.alive:
            continue
        references = worker.references
        left: dict[str, Collection[object]] = {
            "owned": references.owned,
            "held": references.held,
            "lent": references.lent,
            "pending children": references.parents,
            "values": worker.values,
            "errors for values": worker.refused,
        }
        for table, content in left.items():
            if content:
                raise BrokenInvariant("EMPTY", f"worker {worker.me} still has {table}: {', '.join(map(str, content))}")
        if not references.is_empty():
            raise BrokenInvariant("EMPTY", f"worker {worker.me} says that it is not empty")
