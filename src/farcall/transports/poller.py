"""The poller: waits for events on many links, for the leader of an executor and for its standby thread.

One thread, the *leader*, calls `wait` and then the handlers that it returns. While the leader runs user code it cannot
read links. So it calls `run` before, and from then on a frame that arrives wakes a second thread, the *standby* thread.
If no frame arrives, that costs nothing: a call that returns at once wakes no thread and makes no system call.

Which thread is woken
- A link with a ring: the ring says what our leader is doing. The process that writes into the ring signals one of two
  events: the leader's event if the leader sleeps, or the standby thread's event if it runs user code
  (`_native/ring.h`).
- A socket that carries frames is in the leader's epoll. While the leader runs user code, it is also in the standby
  thread's epoll (`_arm_standby`). If it were always in both, each frame would wake two threads.
- A socket that only reports hang-ups or new connections is always in both, because these events are rare.
- A link that is watched while the leader runs user code: the other end does not know that it must wake the standby
  thread, so `watch` wakes it (`_is_running`).

The other ends of links with rings have our events as descriptors. A faulty one could read an event, and so remove a
wake-up for another link. So no sleep is longer than a second (`MAX_SLEEP_S`; `_native` does the same for the leader).

Each reply through a socket costs a system call, and encryption if the link is encrypted. So while more requests are
queued, the replies of the leader are collected, and sent together (`collect`).

Before it sleeps, the leader spins on its rings as long as a peer runs on another core (`_native/ring.h`). Nothing tells
what a peer behind a socket does. So the leader spins on its epoll only if the last wait was over within twice the time
of a spin, if it was not preempted lately, and not in the middle of a large frame (`skip_spin`). Without the C extension
there are no rings, and `_PlainWaiter` is used, which does not look at preemptions.

Any thread may call any method, but only the leader calls `wait`, and only the standby thread `stand_by`.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from farcall._native import rings
from farcall.transports.base import Link

Handler: TypeAlias = Callable[[], None]
"""A function without arguments that the leader calls after an event."""

_READ: Final = select.EPOLLIN | select.EPOLLRDHUP
_HANG_UP: Final = select.EPOLLRDHUP
_ALWAYS: Final = select.EPOLLHUP | select.EPOLLERR
"""Events that the kernel always reports."""
_MAX_SPIN_S: Final = 100e-6
"""The longest time for which `wait` spins before it sleeps."""
_COLLECT_S: Final = 100e-6
"""How long replies are collected before they are sent, if no request takes longer than that."""
MAX_SLEEP_S: Final = 1.0
"""How long the standby thread sleeps at most before it checks whether it is needed."""


class Pollable(Protocol):
    """An object with a file descriptor, such as a link or a listener."""

    def fileno(self) -> int:
        """Returns the file descriptor. Raises `OSError` if the object is closed."""


class _Entry(NamedTuple):
    """What the poller watches on one descriptor.

    Attributes:
        link: The link or listener that has the descriptor.
        handler: What the leader calls after an event.
        events: The epoll events that are watched, as a bit mask.
    """

    link: Any
    handler: Handler
    events: int


class Poller:
    """Waits for events on the links and listeners of one worker, and says which handlers to call.

    The *leader* is the thread that calls `wait` and then the handlers, which may run functions for other workers. While
    it runs such a function, it calls no `wait`. Then frames that arrive wake the *standby thread*, which is in
    `stand_by`, so that it can take over. A *ring* is a queue of frames in shared memory; other links have a socket
    only.

    Args:
        spin_s: Seconds for which `wait` checks for events again and again before it sleeps; 0 to sleep at once.
            The longest time is 0.05 ms if links may have rings, else 0.1 ms; a larger `spin_s` counts as that.
        use_rings: Whether links may have rings. Has no effect without the C extension.
    """

    def __init__(self, spin_s: float, use_rings: bool = True) -> None:
        self.leader_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """An eventfd that wakes the leader. The other end of each link with a ring gets it as a descriptor."""
        self.standby_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """An eventfd that wakes the standby thread. The other end of each link with a ring gets it as a descriptor."""
        self._epoll = select.epoll()  # of the leader
        self._standby_epoll = select.epoll()
        self._rare = select.epoll()  # sockets that report hang-ups and connections; always in the standby epoll
        self._streams = select.epoll()  # sockets with frames; in the standby epoll while the leader is busy
        self._standby_epoll.register(self.standby_event, select.EPOLLIN)
        self._standby_epoll.register(self._rare.fileno(), select.EPOLLIN)
        self._standby_epoll.register(self._streams.fileno(), 0)
        self.has_rings = use_rings and rings is not None
        """Whether links may have rings."""
        self._waiter: Any
        if self.has_rings:
            self._waiter = rings.Waiter(self._epoll.fileno(), self.leader_event, self.standby_event, spin_s)
        else:
            self._waiter = _PlainWaiter(self._epoll, self.leader_event, self.standby_event, spin_s)
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}  # by descriptor
        self._ring_handlers: dict[Any, Handler] = {}  # by RingPair
        self._stream_count = 0
        self._is_armed = False
        self._is_running = False  # the leader runs user code, or waits for a call of its own
        self._unsent: dict[Link, None] = {}  # links whose ring is full
        self._awaiting_room: set[Any] = set()  # links whose socket is full
        self._has_run = False  # the leader has run user code since its last wait, and sockets are watched
        self.collector = 0
        """The ident of the leader while it runs user code and more requests are queued; else 0. See `collect`."""
        self.must_send = False
        """Whether the leader must call `send_collected` before it runs user code."""
        self._collects_until = 0.0
        self._collected: dict[Any, None] = {}  # links with replies that were not sent yet
        self._is_closed = False

    # Watching

    def watch(self, link: Link, handler: Handler) -> None:
        """Makes `wait` return `handler` whenever frames arrive on the link, or the other end closes it.

        Replaces an earlier handler of the link.

        Args:
            link: The link.
            handler: The function that the leader calls. It should call `link.receive`.

        Raises:
            OSError: The link is closed.
        """
        with self._lock:
            ring = getattr(link, "ring", None)
            if ring is None:
                self._register(link, handler, _READ)
            else:
                self._register(link, handler, _HANG_UP)
                self._ring_handlers[ring] = handler
                self._waiter.watch(tuple(self._ring_handlers))
        # `run` sets the flag before it reads what is watched; so this reads the flag after it has registered.
        if self._is_running:
            self.wake_standby()
        else:
            self.wake()

    def watch_hang_up(self, link: Link, handler: Handler) -> None:
        """Makes `wait` return `handler` only when the other end closes the link. Another thread reads its frames.

        Replaces an earlier handler of the link.

        Args:
            link: The link.
            handler: The function that the leader calls.

        Raises:
            OSError: The link is closed.
        """
        with self._lock:
            self._forget_ring(link)
            self._register(link, handler, _HANG_UP)

    def watch_listener(self, listener: Pollable, handler: Handler) -> None:
        """Makes `wait` return `handler` whenever a link can be accepted.

        Replaces an earlier handler of the listener.

        Args:
            listener: The listener.
            handler: The function that the leader calls. It should call `listener.accept`.

        Raises:
            OSError: The listener is closed.
        """
        with self._lock:
            self._register(listener, handler, select.EPOLLIN)

    def note_ring(self, link: Link) -> None:
        """Notes that a link now has a ring. From now on `wait` also returns the link's handler for frames in the ring.

        Called by the link. Does nothing if `watch` was not called for the link. Raises `OSError` if the link is closed.
        """
        with self._lock:
            entry = self._entries.get(link.fileno())
            if entry is not None and entry.link is link and entry.events & select.EPOLLIN:
                self.watch(link, entry.handler)

    def unwatch(self, source: Pollable) -> None:
        """Removes the handler of a link or listener. Call this before the link or listener is closed.

        Does nothing if there is no handler.
        """
        with self._lock:
            self._forget_ring(source)
            self._unsent.pop(source, None)  # type: ignore[call-overload]
            self._awaiting_room.discard(source)
            try:
                descriptor = source.fileno()
            except OSError:  # closed by another thread; its number may soon belong to a new link
                descriptor = next((each for each, entry in self._entries.items() if entry.link is source), -1)
            entry = self._entries.get(descriptor)
            if entry is not None and entry.link is source:
                del self._entries[descriptor]
                self._unregister(descriptor, entry.events)

    def _forget_ring(self, link: Any) -> None:
        """Ends the watching of a link's ring. Does nothing if the link has no ring, or its ring is not watched."""
        ring = getattr(link, "ring", None)
        if ring is not None and self._ring_handlers.pop(ring, None) is not None:
            self._waiter.watch(tuple(self._ring_handlers))
            ring.unwatch()

    def _register(self, source: Any, handler: Handler, events: int) -> None:
        """Watches the descriptor of `source` for `events`, with `handler`. Replaces an earlier handler and its events.

        Raises `OSError` if `source` is closed.
        """
        descriptor = source.fileno()
        if source in self._awaiting_room:
            events |= select.EPOLLOUT
        before = self._entries.get(descriptor)
        # Replace the entry in one step, because the leader reads it without the lock.
        self._entries[descriptor] = _Entry(source, handler, events)
        if before is not None:
            if before.events == events and before.link is source:
                return
            self._unregister(descriptor, before.events)
        self._epoll.register(descriptor, events)
        self._standby_home(events).register(descriptor, events)
        self._stream_count += _is_stream(events)

    def _unregister(self, descriptor: int, events: int) -> None:
        """Ends the watching of a descriptor. `events` are the events for which it is watched.

        Does nothing if the poller or the descriptor is closed.
        """
        if self._is_closed:
            return
        for epoll in (self._epoll, self._standby_home(events)):
            try:
                epoll.unregister(descriptor)
            except OSError as error:
                # Another thread has closed it (EBADF), and perhaps the number belongs to another file now (ENOENT).
                if error.errno not in (errno.EBADF, errno.ENOENT):
                    raise
        self._stream_count -= _is_stream(events)

    def _standby_home(self, events: int) -> select.epoll:
        """Returns the epoll of the standby thread for a descriptor that is watched for `events`.

        It is `_streams` for a socket that carries frames, and `_rare` for everything else.
        """
        return self._streams if _is_stream(events) else self._rare

    def await_room(self, link: Link, is_waiting: bool) -> None:
        """Notes whether a link has queued frames. While it has, the leader calls `link.flush` when there is room.

        Args:
            link: The link, which calls this itself.
            is_waiting: Whether it has queued frames.

        Raises:
            OSError: The link is closed.
        """
        with self._lock:
            if getattr(link, "ring", None) is not None:
                if is_waiting:
                    self._unsent[link] = None
                else:
                    self._unsent.pop(link, None)
                return
            if is_waiting:
                self._awaiting_room.add(link)
            else:
                self._awaiting_room.discard(link)
            descriptor = link.fileno()
            entry = self._entries.get(descriptor)
            if entry is None or entry.link is not link:
                return  # `_register` adds the event when the link is watched
            events = entry.events | select.EPOLLOUT if is_waiting else entry.events & ~select.EPOLLOUT
            if events != entry.events:
                self._entries[descriptor] = _Entry(link, entry.handler, events)
                self._epoll.modify(descriptor, events)
                self._standby_home(events).modify(descriptor, events)

    # Waiting

    def wait(self, seconds: float | None) -> list[Handler]:
        """Waits until there are events, and returns the handlers to call. Only for the leader.

        Exceptions of signal handlers are raised here.

        Args:
            seconds: How long to wait at most; None for no limit, 0 to only look.

        Returns:
            The handlers; an empty list if the time is over. After `wake` it returns early, perhaps with an empty list.
        """
        self._is_running = False
        if self._has_run:
            self._end_run()
        ready = self._waiter.wait(seconds)
        handlers = []
        entries, ring_handlers = self._entries, self._ring_handlers
        for source in ready:
            if type(source) is tuple:
                descriptor, events = source
                entry = entries.get(descriptor)
                # The events that are watched may have changed since this event.
                if entry is not None and events & (entry.events | _ALWAYS):
                    if entry.events & select.EPOLLOUT:
                        handlers.append(_flusher(entry.link))
                    handlers.append(entry.handler)
            elif (handler := ring_handlers.get(source)) is not None:
                handlers.append(handler)
        if self._unsent:
            handlers += [_flusher(link) for link in list(self._unsent)]
        return handlers

    def skip_spin(self) -> None:
        """Makes the next `wait` sleep at once, instead of checking for events again and again first.

        Links call this in the middle of a large frame, because more bytes arrive at once after a sleep.
        """
        self._waiter.skip_spin()

    def wake(self) -> None:
        """Makes the leader return from `wait`. If it is not in `wait`, its next `wait` returns at once."""
        os.eventfd_write(self.leader_event, 1)

    def run(self, has_more: bool) -> None:
        """Notes that the leader is about to run a function for another worker.

        From now on, frames that arrive wake the standby thread. That ends at the next `wait`.

        Args:
            has_more: Whether more requests are queued. Then the standby thread is woken at once.
        """
        self._is_running = True
        self._waiter.run(has_more, False)
        if self._stream_count:
            self._begin_run(has_more)

    def block(self, has_more: bool) -> None:
        """Notes that the leader waits for a call, inside of a function that it runs for another worker.

        Another thread must read the links meanwhile.

        Args:
            has_more: Whether more requests are queued. Then the standby thread is woken at once; otherwise the next
                frame that arrives wakes it.
        """
        self._is_running = True
        self._waiter.run(has_more, True)
        if self._stream_count:
            self._begin_run(False)

    def _begin_run(self, has_more: bool) -> None:
        """Makes frames that arrive through sockets wake the standby thread.

        If `has_more`, the replies of the calling thread are collected from now on, to send them together. Otherwise
        replies are not collected any more.
        """
        self._has_run = True
        if not self._is_armed:
            self._arm_standby(True)
        if has_more or self.collector:
            collector, now = get_ident() if has_more else 0, monotonic()
            if collector != self.collector or now >= self._collects_until:
                self.collector, self._collects_until = collector, now + _COLLECT_S
                self.must_send = bool(self._collected)

    def _end_run(self) -> None:
        """Undoes `_begin_run`, before the leader waits.

        Frames do not wake the standby thread any more, and collected replies are sent.
        """
        self._has_run = False
        if self._is_armed:
            self._arm_standby(False)
        self.collector = 0
        self.send_collected()

    def collect(self, link: Any, frame: bytes) -> bool:
        """Keeps a reply of the leader back, to send it together with the replies to the requests that are queued.

        A reply is kept back for about a millisecond at most. If the next request takes longer, the standby thread
        becomes the leader and sends all collected replies.

        Args:
            link: The link, a `StreamLink`.
            frame: The reply, which has no buffers.

        Returns:
            True if the reply was collected. False if the caller must send it: this thread is not the leader, or no
            other request is queued.
        """
        me = get_ident()
        if self.collector != me:
            return False
        link.append(frame)
        self._collected[link] = None
        if self.collector != me:  # another thread has become the leader, perhaps before it could see the reply
            self.send_collected()
        return True

    def send_collected(self) -> None:
        """Sends all collected replies. Raises nothing, does not wait."""
        self.must_send = False
        while self._collected:
            try:
                link, _ = self._collected.popitem()
            except KeyError:  # another thread does the same
                return
            _flusher(link)()

    def _arm_standby(self, is_armed: bool) -> None:
        """Sets whether the next frame that arrives through a socket wakes the standby thread."""
        self._is_armed = is_armed
        events = select.EPOLLIN | select.EPOLLONESHOT if is_armed else 0
        self._standby_epoll.modify(self._streams.fileno(), events)

    def stand_by(self) -> None:
        """Sleeps until `wake_standby` is called, or there is work that the leader is perhaps too busy to do.

        Such work is a frame that arrives while the leader runs a function, a hang-up, or a new connection. Only for the
        standby thread. Returns after `MAX_SLEEP_S` seconds at the latest, and may return earlier without work.
        """
        self._standby_epoll.poll(MAX_SLEEP_S)
        self._is_armed = False  # a socket event has disarmed it: the leader must arm it for its next function
        try:
            os.eventfd_read(self.standby_event)
        except BlockingIOError:
            pass

    def clear_alert(self) -> None:
        """Allows `run` and `block` to wake the standby thread again. They wake it only once before this call.

        The standby thread calls this before it looks for work.
        """
        self._waiter.clear_alert()

    def has_rare_events(self) -> bool:
        """Returns whether there are new connections or hang-ups that the leader has not handled yet. Does not wait."""
        return bool(self._rare.poll(0))

    def wake_standby(self) -> None:
        """Makes the standby thread return from `stand_by`. If it is not in `stand_by`, its next one returns at once."""
        os.eventfd_write(self.standby_event, 1)

    # The end

    def close(self) -> None:
        """Closes the descriptors, and forgets all handlers. No thread may be in `wait` or `stand_by`.

        May be called twice.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._entries.clear()
            self._ring_handlers.clear()
            self._unsent.clear()
            self._awaiting_room.clear()
            self._waiter.watch(())
            for epoll in (self._epoll, self._standby_epoll, self._rare, self._streams):
                epoll.close()
            os.close(self.leader_event)
            os.close(self.standby_event)

    def abandon(self) -> None:
        """Closes the descriptors in a forked child. The poller of the parent continues to work."""
        self._lock = threading.RLock()
        self.close()


def _is_stream(events: int) -> bool:
    """Returns whether `events` are those of a socket that carries frames: they contain all bits of `_READ`."""
    return events & _READ == _READ


def _flusher(link: Link) -> Handler:
    """Returns a handler that calls `link.flush` and ignores a `ConnectionError`."""

    def flush() -> None:
        try:
            link.flush()
        except ConnectionError:
            pass  # the thread that reads the link gets the same error

    return flush


class _PlainWaiter:
    """Waits for the events of an epoll, for a poller without rings.

    It replaces the class `Waiter` of the C extension, and has the same methods.

    Args:
        epoll: The epoll of the leader.
        leader_event: The eventfd that wakes the leader.
        standby_event: The eventfd that wakes the standby thread.
        spin_s: Seconds for which `wait` checks for events again and again before it sleeps; more than 0.1 ms counts
            as 0.1 ms.
    """

    def __init__(self, epoll: select.epoll, leader_event: int, standby_event: int, spin_s: float) -> None:
        self._epoll = epoll
        self._leader_event = leader_event
        self._standby_event = standby_event
        self._spin_s = min(spin_s, _MAX_SPIN_S)
        self._is_alerted = False
        self._spins = False
        self._epoll.register(leader_event, select.EPOLLIN | select.EPOLLET)

    def watch(self, pairs: tuple[Any, ...]) -> None:
        """Does nothing if `pairs`, the rings to wait for, is empty. Otherwise raises `TypeError`.

        Only the class `Waiter` of the C extension can wait for rings.
        """
        if pairs:
            raise TypeError("rings need the C extension")

    def wait(self, seconds: float | None) -> list[tuple[int, int]]:
        """Waits for events, for at most `seconds`; None for no limit, 0 to only look.

        Returns pairs of descriptor and events. Returns an empty list if the time is over, or if only `leader_event` has
        woken the leader.
        """
        poll = self._epoll.poll
        start = monotonic()
        stop = start + self._spin_s if self._spins else start
        while not (events := poll(0)) and monotonic() < stop:
            pass
        if not events:
            events = poll(seconds)
        self._spins = monotonic() - start < 2 * self._spin_s
        return [event for event in events if event[0] != self._leader_event]

    def skip_spin(self) -> None:
        """Makes the next `wait` sleep at once, instead of checking for events again and again first."""
        self._spins = False

    def run(self, has_more: bool, is_blocked: bool) -> None:
        """Wakes the standby thread if `has_more` is True; otherwise does nothing. `is_blocked` is ignored.

        The standby thread is woken only once until `clear_alert` is called.
        """
        if has_more and not self._is_alerted:
            self._is_alerted = True
            os.eventfd_write(self._standby_event, 1)

    def clear_alert(self) -> None:
        """Allows `run` to wake the standby thread again."""
        self._is_alerted = False
