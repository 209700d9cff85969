"""Workers of an open group as threads of this process, and how one of them dies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farcall.rendezvous import Rendezvous, ensure_store, join_open, leave_open, rendezvous
from farcall.rendezvous.open_group_store import OpenStore


@dataclass(eq=False)
class Worker:
    """A worker that has joined."""

    name: str
    meeting: Rendezvous
    number: int
    there: dict[int, bytes]

    @property
    def store(self) -> OpenStore:
        assert isinstance(self.meeting.store, OpenStore)
        return self.meeting.store

    def crash(self) -> None:
        """What the kernel does with a process that is killed: its sockets and locks are gone, its files stay."""
        store = self.store
        if store._hosted is not None:
            store._hosted.server.close(linger=0)
        if store._presence is not None:
            store._presence.abandon()
        if store._client is not None:
            store._client.close()

    def leave(self) -> None:
        leave_open(self.meeting, self.number)
        self.store.close()

    def ensure_store(self, *here: Worker, gone: Sequence[Worker] = ()) -> bool:
        """As its agent would, if these are the others that it knows of, and these those that it knows to be gone."""
        workers = (self, *here)
        seen = {worker.number: (worker.name, payload(worker.name, worker.number)) for worker in workers}
        return ensure_store(self.meeting, seen, max(seen) + 1, {worker.name for worker in gone})


class OpenStage:
    """Makes workers at one place; `close` takes them all down."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.meetings: list[Rendezvous] = []

    def meet(self, name: str, timeout: float = 30.0) -> Rendezvous:
        self.meetings.append(rendezvous(self.url, name, -1, None, timeout, "127.0.0.1"))
        return self.meetings[-1]

    def join(self, name: str, timeout: float = 30.0) -> Worker:
        meeting = self.meet(name)
        return Worker(name, meeting, *join_open(meeting, name, lambda number: payload(name, number), timeout))

    def close(self) -> None:
        for meeting in self.meetings:
            meeting.store.close()


def payload(name: str, number: int) -> bytes:
    return b"%s is %d" % (name.encode(), number)


def hosts(*workers: Worker) -> list[bool]:
    return [worker.store.hosts for worker in workers]
