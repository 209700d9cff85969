"""The books of references of several workers, wired by hand: every message goes when the test says so."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from farcall.agent.book import ReferenceBook
from farcall.agent.handle import Handle
from farcall.agent.lending import LENT_FOR
from farcall.agent.parcels import Letter
from farcall.errors import RpcError
from farcall.protocol.control import unpack_remote
from farcall.protocol.wire import CONTROL, REMOTE, Decoder


class Way:
    """A connection."""

    def __init__(self, lost: bool = False) -> None:
        self.lost = lost

    def is_lost(self) -> bool:
        return self.lost


WAY = Way()
CALL: tuple[bytes, bytes, list[memoryview]] = (b"module\0function", b"", [])
"""What is to be called: its name, the arguments, and no buffers."""


class Books:
    """The books of some workers that know each other, and what each has posted."""

    def __init__(self, size: int = 3, kind: type[ReferenceBook] = ReferenceBook) -> None:
        self.posted: list[tuple[int, int]] = []
        self.woken = 0
        self.books = [self._new(kind, rank) for rank in range(size)]
        for book in self.books:
            for rank in range(size):
                book.joined(rank)

    def _new(self, kind: type[ReferenceBook], rank: int) -> ReferenceBook:
        return kind(rank, lambda to: self.posted.append((rank, to)), self._wake, lambda worker: f"w{worker}")

    def _wake(self) -> None:
        self.woken += 1

    def __getitem__(self, rank: int) -> ReferenceBook:
        return self.books[rank]

    def deliver(self) -> int:
        """Carries control messages to and fro until nobody has anything to say; how many letters that were."""
        letters = quiet = 0
        while True:
            before = letters
            for sender, book in enumerate(self.books):
                book.work_off()
                for to in range(len(self.books)):
                    letter = book.mailboxes.outbox(to)
                    if letter is not None:
                        letters += 1
                        self[to].control_received(sender, letter.body)
            quiet = quiet + 1 if letters == before else 0
            if quiet == 2 * LENT_FOR:  # what is lent is asked for at the second look
                return letters

    def moment(self, rank: int) -> None:
        """Passes at a worker: the owners of what is lent to it are to be asked."""
        for _ in range(2 * LENT_FOR):
            self[rank].work_off()

    def remote(self, creator: int, owner: int, *passed: Handle, deliver: bool = True) -> tuple[Handle, Any]:
        """A remote call: the creator's handle, and what the owner got: the value and the handles."""
        handle, message = self[creator].call_remote(owner, passed, *CALL, WAY)
        letter, (number, carried, reference, fork, _) = read_remote(message)

        def arrive() -> Any:
            if letter is not None:
                self[owner].control_received(creator, letter)
            return self[owner].create_requested(creator, number, reference, fork, carried)

        self.last_call = arrive
        return handle, arrive() if deliver else None

    def pass_on(self, sender: int, to: int, *handles: Handle) -> list[Handle]:
        number, carried = self[sender].pass_on(handles, to, WAY)
        taken = self[to].take(sender, number, carried)
        assert taken is not None
        return taken

    def left(self) -> dict[int, Any]:
        gc.collect()
        self.deliver()
        return {
            rank: (dict(book._references.owned), dict(book._references.held), dict(book._values))
            for rank, book in enumerate(self.books)
            if not book._references.is_empty() or book._values or not book.is_quiet() or book._origins
        }


def read_remote(message: bytes) -> tuple[Any, Any]:
    """What a remote call has to say: the letter before it, None if there is none, and what is in its head."""
    *letters, call = Decoder().feed(message)
    assert all(kind == CONTROL for kind, *_ in letters)
    assert call[0] == REMOTE
    return letters[0][3] if letters else None, unpack_remote(call[2])


def only(letter: Letter | None) -> Letter:
    """The letter that must be there."""
    assert letter is not None
    return letter


def error_of(handle: Handle) -> RpcError | None:
    """What a use of the handle raises."""
    return handle.new_error() if handle.new_error is not None else None


WAYS_TO_PASS: dict[str, Callable[[ReferenceBook, list[Handle]], Any]] = {
    "pass_on": lambda book, handles: book.pass_on(handles, 1, WAY),
    "call_remote": lambda book, handles: book.call_remote(1, handles, *CALL, WAY),
}


made: list[str] = []


class Sensitive(Exception):
    """An error that notes when it is made anew."""

    def __reduce__(self) -> Any:
        return make_anew, self.args


def make_anew(text: str) -> Sensitive:
    made.append(text)
    return Sensitive(text)
