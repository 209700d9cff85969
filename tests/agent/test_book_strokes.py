"""What the book does at one stroke (`hearing.py`, `tending.py`) comes to the same as the protocol, step by step.

The protocol is simulated and explored; the strokes are not it. So the same random story is told to two groups of books,
one of which knows no strokes, and after each step their tables must be alike.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from farcall.agent.book import ReferenceBook
from farcall.agent.hearing import create_answered
from farcall.agent.mailboxes import ANSWERS
from farcall.agent.parcels import RemoteFrame
from farcall.agent.tending import tend
from farcall.protocol.control import unpack_control, unpack_remote
from farcall.protocol.ids import Worker
from farcall.protocol.wire import Decoder
from tests.agent.book_stage import CALL, WAY, Books

SIZE = 3
STEPS = 80


class WithoutStrokes(ReferenceBook):
    """Asks the protocol about each message by itself."""

    def control_received(self, sender: Worker, body: bytes | bytearray | memoryview) -> None:
        acknowledged, messages = unpack_control(body)
        try:
            with self._lock:
                for parcel in self.mailboxes.delivery.acknowledged(sender, acknowledged):
                    if isinstance(parcel, RemoteFrame):
                        self._decide(self._references.create_delivered(parcel.reference, parcel.fork))
                if messages:
                    self._owe(sender)
                for number, message in messages:
                    if self.mailboxes.delivery.receive(sender, number):
                        self._decide(self._references.message_received(sender, message))
                        if type(message) in ANSWERS:
                            asked = self.mailboxes.asked
                            asked[sender] = max(0, asked.get(sender, 0) - 1)
        finally:
            self._act()


class Told:
    """As much of a `ToldCall` as the book sees."""

    call_id = 1
    number = 0


class Story:
    """One group of books, and the handles that its workers have."""

    def __init__(self, strokes: bool) -> None:
        self.strokes = strokes
        self.books = Books(SIZE, ReferenceBook if strokes else WithoutStrokes)
        self.handles: list[list[Any]] = [[] for _ in range(SIZE)]
        self.letters: list[tuple[int, int, bytes]] = []
        self.gone: set[int] = set()

    def remote(self, creator: int, owner: int, told: bool) -> None:
        """A remote call, answered if `told`, in which case the creator knows that it has come."""
        call = Told() if told else None
        handle, message = self.books[creator].call_remote(owner, [], *CALL, WAY, None, call)  # type: ignore[arg-type]
        *before, last = Decoder().feed(message)
        for _, _, _, body, _ in before:
            self.books[owner].control_received(creator, bytes(body))
        head = last[2]
        value = create_answered(self.books[owner], creator, head) if told and self.strokes else None
        if value is None:
            number, carried, reference, fork, _ = unpack_remote(head)
            taken = self.books[owner].create_requested(creator, number, reference, fork, carried, told)
            value = taken[0] if taken is not None else None
        if value is not None and not value.done():
            value.give(7)
        if call is not None:
            self.books[creator].delivered.append((owner, call.number))
        self.handles[creator].append(handle)

    def pass_on(self, sender: int, to: int, which: int) -> None:
        handles = self.handles[sender]
        if handles and handles[which % len(handles)].new_error is None:
            self.handles[to] += self.books.pass_on(sender, to, handles[which % len(handles)])

    def drop(self, worker: int, which: int) -> None:
        handles = self.handles[worker]
        if handles:
            del handles[which % len(handles)]

    def work_off(self, worker: int, tended: bool) -> None:
        """The strokes first, if there are any: what they leave is done as ever."""
        if tended and self.strokes:
            tend(self.books[worker])
        self.books[worker].work_off()

    def write(self, sender: int, to: int) -> None:
        letter = self.books[sender].mailboxes.outbox(to)
        if letter is not None:
            self.letters.append((sender, to, letter.body))

    def read(self, which: int, keep: bool) -> None:
        """A letter arrives, not always the first; one that is kept arrives once more."""
        if self.letters:
            sender, to, body = self.letters[which % len(self.letters)]
            if not keep:
                del self.letters[which % len(self.letters)]
            if not {sender, to} & self.gone:
                self.books[to].control_received(sender, body)

    def lose(self, worker: int) -> None:
        self.gone.add(worker)
        self.handles[worker].clear()
        for rank in range(SIZE):
            if rank not in self.gone:
                self.books[rank].lost(worker)

    def tables(self) -> list[Any]:
        """All that the books of those who are there say, but for the order in which messages got their numbers."""
        return [self._tables(self.books[rank]) for rank in range(SIZE) if rank not in self.gone]

    def _tables(self, book: ReferenceBook) -> dict[str, Any]:
        book.count_created()
        references, boxes = book._references, book.mailboxes
        return {
            "owned": {
                reference: (owned.created, owned.refused, owned.handles, dict(owned.forks))
                for reference, owned in references.owned.items()
            },
            "held": {
                fork: (held.reference, held.standing, held.parent, held.dropped, dict(held.children))
                for fork, held in references.held.items()
            },
            "lent": set(references.lent),
            "parents": dict(references.parents),
            "values": {reference: value.done() for reference, value in book._values.items()},
            "confirmed": sorted(handle.fork for handle in self.handles[book.me] if handle.fork and handle.confirmed),
            "failed": sorted(handle.fork for handle in self.handles[book.me] if handle.fork and handle.new_error),
            "known": set(book._handles),
            "to say": {to: Counter(message for _, message in box) for to, box in boxes.outboxes.items()},
            "kept": {
                peer: (link.last, link.received.mark, Counter(map(_said, link.unacknowledged.values())))
                for peer, link in boxes.delivery.links.items()
            },
        }


def _said(parcel: Any) -> Any:
    if isinstance(parcel, RemoteFrame):
        return parcel.reference, parcel.fork
    return parcel if isinstance(parcel, tuple) else type(parcel).__name__


def next_step(dice: random.Random, gone: set[int]) -> Callable[[Story], None]:
    there = [rank for rank in range(SIZE) if rank not in gone]
    one, other, which = dice.choice(there), dice.choice(there), dice.randrange(1000)
    flag = dice.random() < 0.5
    what = dice.random()
    if what < 0.2 and one != other:
        return lambda story: story.remote(one, other, flag)
    if what < 0.35 and one != other:
        return lambda story: story.pass_on(one, other, which)
    if what < 0.55:
        return lambda story: story.drop(one, which)
    if what < 0.7:
        return lambda story: story.work_off(one, flag)
    if what < 0.84 and one != other:
        return lambda story: story.write(one, other)
    if what < 0.995 or len(there) < 2:
        keep = dice.random() < 0.1
        return lambda story: story.read(which, keep)
    return lambda story: story.lose(one)


@pytest.mark.parametrize("seed", range(40))
def test_the_same_story_leaves_the_same_tables(seed: int) -> None:
    for number in range(25):
        dice = random.Random(1000 * seed + number)
        with_strokes, without = Story(True), Story(False)
        for step in range(STEPS):
            act = next_step(dice, without.gone)
            for story in (with_strokes, without):
                act(story)
            assert_alike(with_strokes, without, (seed, number, step))
        for story in (with_strokes, without):
            while story.letters:
                story.read(0, False)
        assert_alike(with_strokes, without, (seed, number, "the end"))
        for story in (with_strokes, without):
            for handles in story.handles:
                handles.clear()
            gc.collect(0)
            settle(story)
            assert all(
                not story.books[rank]._references.owned and not story.books[rank]._references.held
                for rank in range(SIZE)
                if rank not in story.gone
            ), (seed, number)


def settle(story: Story) -> None:
    """Everything is said until there is nothing left to say."""
    for _ in range(12):
        for rank in range(SIZE):
            if rank not in story.gone:
                story.work_off(rank, False)
                for to in range(SIZE):
                    story.write(rank, to)
        while story.letters:
            story.read(0, False)


def assert_alike(one: Story, other: Story, when: object) -> None:
    for mine, its in zip(one.tables(), other.tables(), strict=True):
        for name, table in mine.items():
            assert table == its[name], (when, name)
