"""Who reads a connection: the hand-over of the reader's role between the threads that wait for its replies.

Only one thread may read at a time, and it should be one that waits anyway: a reply then needs no second thread to wake
the first. A thread that wants a reply takes the role if it is free and reads until its own reply is there, handing
other replies to their futures; else it queues and sleeps until its reply has come *or* it is handed the role. Those
whose replies were read together take turns (`turns.py`): they line up and nap on, the reader gives way, and the last of
them reads again. Where nobody waits, a background reader (the serving pool) is asked to watch the connection: at once
if somebody has hung a callback on a future (`attend`), or after a while by the supervisor if nobody has (`look_after`):
reading a burst of replies later, all at once, is cheaper for everybody.

Rules, each tested over every interleaving
- At most one thread has the role.
- No wake-up is lost: while the role is free, nobody sleeps in the queue, unless somebody naps there or in the line. Who
  naps looks for itself before long: if its reply has not come and nobody reads, it does; and who leaves while the role
  is free hands it on. So it matters not what a thread does that was let out.
- Who comes to sleep, and only who does, lets the next one out, after it has sent its request; unless somebody reads in
  its turn just then, who will do that.
- Who was let out has the *turn* for a while. If it waits again while others are in the line it may take the role, if
  that is free, and look for its reply, for a moment and without sleeping. If that comes it leaves, the role is free,
  and the line stays as it is. If not, or if its turn is over, others go first. A turn promises nothing: who has it may
  never come back, and those in the line look for themselves.
- In the line are those only whose replies have come and who have not looked for themselves. Lining up and leaving are
  done under the lock.
- The role is taken and handed on under the lock. But a holder that looked for its reply in its turn, on the path of
  every call, gives it up in one statement that calls nothing: neither another thread nor Ctrl-C comes in between. If
  somebody is in the line then, and no future has a callback, there is nobody to hand it to.
- The role goes to a thread whose reply has not come yet: one that was woken by its reply would only hand it on, and
  waking takes longer than reading. If that one naps, the role stays free: who leaves is likely back before it is woken.
- A thread that leaves (its reply came, its time is over, Ctrl-C) and has just been handed the role hands it on. Ctrl-C
  may come at any line; so the role is known by its holder, and every step of leaving can be done again.
- A signal handler or a finalizer may wait in the midst of a wait of the same thread. The lock lets it in. If the thread
  has the role the inner wait uses it, and leaves it to the outer one. If it queues, the inner wait stands before the
  outer one, which cannot run. Where the outer one must go on first, in the midst of a decision, waiting is refused.
- The connection is watched in the background only while the role is free, so that a reply never wakes two threads.

The machine knows no socket: `Readable` is the connection as it sees it. Locks and gates are handed in, so that a test
can put its own scheduler beneath.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Any, Final, Protocol

from farcall.agent.turns import Bell, Bells, Turns
from farcall.errors import UsageError
from farcall.futures import Future
from farcall.protocol.wire import Decoder, Message
from farcall.sleeping import Gate, blocking_thread
from farcall.transports.base import Channel


class Readable(Protocol):
    """The connection, as the role sees it."""

    def read_until(self, future: Future[Any], deadline: float, nested: bool = False) -> None:
        """Reads and settles futures until this one is settled or the deadline passes. Only for the role's holder.

        `nested`: this thread reads already, further out. Raises `UsageError` if that must go on first.
        """

    def glance(self, future: Future[Any]) -> None:
        """Reads and settles futures until this one is settled, if that is at once. Only for the role's holder."""

    def doze(self, gate: Gate) -> None:
        """Waits there for a moment, if this thread has a place that it would give away, and that has paid before."""

    def check_wait(self) -> None:
        """Raises `UsageError` if this thread is in the midst of something that must go on before a reply can come."""

    def watch_in_background(self, on: bool) -> None:
        """Starts or stops waking the background reader when something can be read. Must not block."""

    def has_pending(self) -> bool:
        """Whether a reply is still awaited."""

    def unattended(self) -> None:
        """Replies are awaited, nobody reads, nobody watches: to be looked after when convenient. Must not block."""


_TRIES: Final = 100
"""Interrupts that a thread may get while it leaves; more than anybody can press Ctrl-C in that time."""

CHUNK: Final = 1 << 15
"""So much is read at once: from 128 KiB on, the allocator asks the system for memory anew each time, which costs more
than a call."""
LOOK_AGAIN: Final = 1.0
"""Seconds for which a reader sleeps at most before it looks again."""
_LOOK_AGAIN_SOON: Final = 5e-3
"""In the main thread, and twice as long each time: a signal handler that waits in the midst of a sleep may read the
reply that the sleeper waits for, and nothing wakes the sleeper then."""
_MAIN: Final = threading.main_thread().ident

CANNOT_WAIT: Final = (
    "a signal handler or finalizer cannot wait for a call here: it interrupts its own thread in the midst of {}, which "
    "must go on first; use rpc_async in it"
)


class Seat:
    """One thread in the queue for the role."""

    __slots__ = ("_reading", "bell", "future", "gate", "lined_up", "napping", "outer", "since", "thread")

    def __init__(self, reading: Reading, thread: int, future: Future[Any]) -> None:
        self._reading = reading
        self.thread = thread
        self.future = future
        self.outer: Seat | None = None  # of the same thread: it can go on only after this one
        self.bell: Bell | None = None  # where it naps, or has napped
        self.gate: Gate | None = None  # where it sleeps, if it does not nap
        self.napping = False  # and its reply has not come
        self.lined_up = False  # and it may be in the line
        self.since = 0.0  # if it is: when that began

    def settled(self, _: object) -> None:
        """The reply has come. If who has read it takes turns this thread lines up, and naps on; else it is woken."""
        reading = self._reading
        with reading._lock:
            if self.napping and reading._holder == get_ident() and blocking_thread.before is None:
                self.napping = False
                self.lined_up, self.since = True, monotonic()
                reading.line.append(self)
                return
        self.wake()

    def wake(self) -> None:
        """Wakes the thread wherever it sleeps. It may be awake already."""
        gate, bell = self.gate, self.bell
        if gate is not None:
            gate.open()
        elif bell is not None:
            bell.ring()


class Reading:
    """The reader's role of one connection."""

    __slots__ = ("_connection", "_holder", "_lock", "_new_gate", "_queue", "_urgent", "_watched", "line", "turns")

    def __init__(
        self,
        connection: Readable,
        new_lock: Callable[[], Any] = threading.RLock,
        new_gate: Callable[[], Gate] = Gate,
        turns: Turns | None = None,
    ) -> None:
        self._connection = connection
        self._lock = new_lock()
        self._new_gate = new_gate
        self._queue: dict[int, Seat] = {}  # by thread
        self._holder = 0  # the thread that has the role
        self._watched = False  # the background reader is woken by what comes
        self._urgent = False  # a future with a callback is pending
        self.line: deque[Seat] = deque()
        """Those whose replies have come, and who nap on until it is their turn."""
        self.turns = turns or Turns(Bells())

    def wait(self, future: Future[Any], deadline: float) -> None:
        """Returns when the future is settled or the deadline has passed; reads the connection if nobody does.

        Raises `UsageError` where this thread cannot wait, for what it does already further out.
        """
        me = get_ident()
        seat = None
        nested = self._holder == me
        try:
            if self._holder and not nested and self._lock._is_owned():
                raise UsageError(CANNOT_WAIT.format("handing over the reading"))
            with self._lock:
                if not self._holder and (not self.line or self.turns.turn.lasts(me)):
                    self._holder = me
                    if self._watched:
                        self._unwatch()
                elif self._holder == me:
                    nested = True  # perhaps just now, handed to the outer wait
                else:
                    seat = Seat(self, me, future)
                    self._sit_down(seat)
            if nested:
                self._connection.read_until(future, deadline, nested=True)
                return
            if seat is None:
                while True:
                    if not self.line:
                        self._connection.read_until(future, deadline)
                        if future._state or not self.line:
                            return
                    if self._goes_on(me, future):
                        self._holder = 0 if self.line and not self._urgent else me  # not leave(): see the rules
                        return
                    if self.line:  # else they have looked for themselves meanwhile
                        break
                seat = Seat(self, me, future)
                self._give_way(seat)
            self._connection.check_wait()
            future.watch(seat.settled, waker=True, attended=True)
            if seat.gate is not None and not future._state and self._holder != me:
                self._connection.doze(seat.gate)
            while not future._state and self._pass_time(seat, deadline):
                pass
        finally:
            # Ctrl-C may come here too. Python looks for signals only after calls, so there must be none before the
            # `try`; and whatever was interrupted is done again.
            if not nested:
                try:
                    if seat is not None:
                        self._end(me, seat, future)
                    elif self._holder == me:
                        self.leave()
                except BaseException:
                    try:
                        self._end_in_any_case(me, seat, future)
                    except BaseException:
                        self._end_in_any_case(me, seat, future)
                        raise
                    raise

    def _unwatch(self) -> None:
        self._watched = False
        self._connection.watch_in_background(False)

    def _sit_down(self, seat: Seat) -> None:
        """Queues, to nap or to sleep. Who serves does not nap: it has a place to give away. Under the lock."""
        seat.bell = seat.bell or (self.turns.bell() if blocking_thread.before is None else None)
        if seat.bell is not None:
            seat.napping = True
            seat.gate = None
        elif seat.gate is None:
            seat.gate = self._new_gate()
        seat.outer = self._queue.get(seat.thread)
        self._queue[seat.thread] = seat

    def _stand_up(self, seat: Seat) -> None:
        """Leaves the queue, if it is there. May be done twice. Under the lock."""
        if self._queue.get(seat.thread) is seat:
            if seat.outer is None:
                del self._queue[seat.thread]
            else:
                self._queue[seat.thread] = seat.outer

    def _goes_on(self, me: int, future: Future[Any]) -> bool:
        """Others are in the line. The holder looks for its reply nevertheless, for a moment, if it is its turn.

        Whether that came; else those go first.
        """
        turn = self.turns.turn
        if not turn.lasts(me):
            return False
        self._connection.glance(future)
        if future._state:
            if turn.in_doubt:
                turn.paid()
            return True
        turn.missed()
        return False

    def _give_way(self, seat: Seat) -> None:
        """The holder has read replies of others. They go first, one by one, and the last of them reads on."""
        with self._lock:
            self._sit_down(seat)
            if seat.napping:
                self._holder = 0
                return
            self._stand_up(seat)
        while self.line:
            self.let_out()  # it takes no turns itself

    def _pass_time(self, seat: Seat, deadline: float) -> bool:
        """Reads, naps or sleeps; False if the deadline has passed, or nothing can be read any more."""
        gate, bell = seat.gate, seat.bell
        if gate is None and bell is not None:
            if self.line and (not self._holder or self.turns.turn.is_over(seat.thread)):
                self.let_out()
            left = deadline - monotonic()
            if left <= 0:
                return False
            if not bell.nap(left, len(self._queue)):
                self._stop_napping(seat)
            return True
        if self._is_holder(seat.thread):
            self._connection.read_until(seat.future, deadline)
            if seat.future._state or not self.line:
                return False
            self._give_way(seat)
            return True
        if self.line and (not self._holder or self.turns.turn.is_over(seat.thread)):
            self.let_out()
        return gate is not None and gate.sleep(deadline)

    def let_out(self) -> None:
        """Lets the first in the line go on. Who is about to sleep does this."""
        try:
            seat = self.line.popleft()
        except IndexError:
            return
        seat.lined_up = False
        self.turns.begin(seat.thread, seat.since, len(self.line))
        seat.wake()

    def _stop_napping(self, seat: Seat) -> None:
        """Nobody has woken the thread: it goes on if its reply is there, reads if nobody does, and else sleeps."""
        with self._lock:
            seat.napping = False
            if seat.gate is None:
                seat.gate = self._new_gate()
            reads = not self._holder and not seat.future._state
            if reads:
                self._holder = seat.thread
                self._stand_up(seat)
                if self._watched:
                    self._unwatch()
        if reads or seat.future._state:
            self.turns.broken()

    def _is_holder(self, me: int) -> bool:
        with self._lock:  # not while the role is being handed over
            return self._holder == me

    def _end_in_any_case(self, me: int, seat: Seat | None, future: Future[Any]) -> None:
        """Does again what was interrupted, however often that happens."""
        interrupt: BaseException | None = None
        for _ in range(_TRIES):
            try:
                if seat is not None:
                    self._end(me, seat, future)
                elif self._holder == me:
                    self.leave()
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _end(self, me: int, seat: Seat, future: Future[Any]) -> None:
        """Leaves the queue, and gives up the role if it came. Each step may be done twice."""
        if not future._state:
            future.forget(seat.settled)
        with self._lock:
            seat.napping = False
            self._stand_up(seat)
            if seat.lined_up and seat in self.line:
                self.line.remove(seat)
            if self._holder == me or not (self._holder or self.line):
                self.leave()
        bell, seat.bell = seat.bell, None
        if bell is not None:
            self.turns.bells.put_back(bell)

    def leave(self) -> None:
        """The holder gives the role up; the first in the queue that needs it gets it.

        Unless that one naps, and looks for itself soon: more likely, who leaves is back before that. And those who are
        in the line, if any, come by here. To be called again if it was interrupted.
        """
        with self._lock:
            if self.line and not self._urgent:  # nobody is to be looked for, on the path of every call of a turn
                self._holder = 0
                return
            seat = self._next() if self._queue else None
            if seat is not None and seat.gate is not None and not self.line:
                seat.gate.open()
                if self._watched:  # who leaves is the background reader
                    self._unwatch()
                self._holder = seat.thread  # last: until then the role is ours to hand on
                self._stand_up(seat)
                return
            if (seat is None and not self.line) or self._urgent:
                if self._connection.has_pending():
                    if self._urgent and not self._watched:
                        self._connection.watch_in_background(True)
                        self._watched = True
                    if not self._watched:
                        self._connection.unattended()
                else:
                    self._urgent = False
            self._holder = 0  # last, as above

    def _next(self) -> Seat | None:
        """Who is to have the role: the first whose reply has not come. Others have been woken, and would only leave.

        But a thread that waits further out as well gets it where it waits now: there it goes on.
        """
        for seat in self._queue.values():
            waits: Seat | None = seat
            while waits is not None:
                if not waits.future._state:
                    return seat
                waits = waits.outer
        return None

    def enter_in_background(self) -> bool:
        """Takes the role for the background reader, which reads what is there and leaves; False if somebody has it."""
        with self._lock:
            if self._holder:
                return False
            self._holder = get_ident()
            return True

    def attend(self) -> None:
        """A pending future has a callback: from now on the background reader reads whenever nobody else does."""
        with self._lock:
            self._urgent = True
            self._watch_if_free()

    def look_after(self) -> None:
        """Nobody has read for a while: if replies are awaited and nobody reads, have the background reader do it."""
        with self._lock:
            if self._connection.has_pending():
                self._watch_if_free()

    def _watch_if_free(self) -> None:
        if not self._holder and not self._watched:
            self._connection.watch_in_background(True)
            self._watched = True


def receive_large(channel: Channel, decoder: Decoder) -> list[Message] | None:
    """Goes on receiving a large message into its place, as far as it has come, or to the end of a part.

    What is whole now; None if the other side has closed the connection. Raises `OSError`, `BlockingIOError` if nothing
    has come, and `ProtocolError`.
    """
    messages: list[Message] = []
    while (space := decoder.space) is not None and not messages:
        count = channel.receive_into(space)
        if not count:
            return None
        messages = decoder.filled(count)
        if count < space.nbytes:
            break  # most likely that was all: to ask again would cost more than the poller does
    return messages


def first_pause() -> float:
    """For how many seconds this thread may sleep when it begins to read."""
    return _LOOK_AGAIN_SOON if get_ident() == _MAIN else LOOK_AGAIN
