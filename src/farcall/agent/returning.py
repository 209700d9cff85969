"""A reply whose buffers lie in memory that its caller has lent: they go back in it, or are copied as others are.

A function that changes an array in place and returns it is as common as any. The caller has lent the memory of that
array, and can have it again, if nothing here can reach it any more: no global, no view, no frame. Nobody knows before
the result and the arguments are let go of. So the reply is made in two steps: first all that is needed of the result;
then, when whoever ran the function has let go of all it had, `made` lets go of the buffers, and looks.

Rules
- What is still in use is copied, and stays as it is: who kept it sees nothing of what the caller does with the reply.
- While that is copied the caller's memory is held: who had it may let go of it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

from farcall.agent.jobs import Reply
from farcall.protocol.wire import encode_returned
from farcall.transports.base import Buffer
from farcall.transports.borrowed_memory import Loan

Send: TypeAlias = Callable[[int, int, bytes, bytes, Sequence[memoryview]], Sequence[Buffer] | None]
"""Given kind, call id, head, body and buffers: the pieces of a large reply; None if it has been sent."""


@final
class Returning:
    """Such a reply, before that is known."""

    __slots__ = ("_body", "_buffers", "_call_id", "_head", "_kind", "_loan", "_send")

    def __init__(
        self, loan: Loan, kind: int, call_id: int, head: bytes, body: bytes, buffers: list[memoryview], send: Send
    ) -> None:
        """`send`: makes or sends the reply with copies of these buffers. The list is emptied."""
        self._loan = loan
        self._kind = kind
        self._call_id = call_id
        self._head = head
        self._body = body
        self._buffers = buffers
        self._send = send

    def made(self) -> Reply | None:
        """The reply; None if it has been sent. Once, and with nothing of the result in any frame."""
        loan = self._loan
        with loan:
            self._buffers.clear()
            start = (self._kind, self._call_id, self._head, self._body)
            returned = encode_returned(*start, loan.sizes, loan.number, loan.offsets)
            if loan.give():
                return returned
            sent = self._send(*start, loan.views())
            # Views, and not copies, go on the channel: they are there only as long as the loan is held.
            return sent if sent is None else [bytes(piece) for piece in sent]
