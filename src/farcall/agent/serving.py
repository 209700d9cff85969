"""The threads that serve: they read what others send, and run what others call.

One thread leads: it waits on the poller, reads requests, and runs them itself, one after the other. The others follow:
they sleep, or run what the leader left. When a function of the leader proves slow, another thread takes the lead
(`leading.py` says how) and the first goes on with its function as a follower. So a small call wakes nobody, and a slow
one delays the next by a moment only.

Rules
- At most `limit` functions run at once. One that sleeps in a wait of ours does not count: another thread takes its
  place, and a new one is made if none is idle. So calls nested to any depth end, whatever the limit.
- Jobs begin in the order in which they came.
- Replies of a burst are queued and flushed together, at the latest when the leader runs out of jobs, has done `_BURST`
  of them, steps down or is deposed.
- State is changed under the lock; threads are woken and jobs are run outside it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import Final, Protocol, TypeAlias

from farcall.agent.leading import Lead
from farcall.agent.poller import Poller
from farcall.agent.spinning import Spinning
from farcall.futures import Gate, blocking_thread
from farcall.transports.base import Buffer

logger = logging.getLogger("farcall")

SLOW: Final = 1e-3
"""A function that took longer than this is run with the lead given away first, next time."""
_BURST: Final = 64
_IDLE_LIFE: Final = 10.0

Reply: TypeAlias = bytes | Sequence[Buffer]
"""A small one in one piece, or the pieces of a large one."""


class Answerable(Protocol):
    """Where a reply goes."""

    @property
    def queue_answer(self) -> Callable[[bytes], None]:
        """Queues a small one for `flush_answers`. Never raises."""

    def answer(self, reply: Reply) -> None:
        """Sends it now. Never raises."""

    def flush_answers(self) -> None:
        """Sends what is queued. Never raises."""


class Job(Protocol):
    """Something to run."""

    @property
    def kind(self) -> object:
        """Jobs of one kind take about the same time: the name of the function."""

    @property
    def origin(self) -> Answerable | None:
        """Whom to answer."""

    @property
    def must_run(self) -> bool:
        """Whether it is to be run though the pool closes."""

    def run(self) -> Reply | None:
        """Runs it; the reply to send to `origin`, if there is one yet. Never raises."""


class Serving:
    """The serving pool of one agent."""

    def __init__(self, name: str, poller: Poller, limit: int, spin: float, wake_supervisor: Callable[[], None]) -> None:
        self._name = name
        self._poller = poller
        self._limit = limit
        self._spinning = Spinning(spin)
        self._wake_supervisor = wake_supervisor
        self._lock = threading.Lock()
        self._idle: list[_Follower] = []  # the one that slept last wakes first: its stack is warm
        self._threads: set[threading.Thread] = set()
        self._numbered = 0
        self._running = 0  # functions that run, and do not sleep, in followers
        self._unflushed: list[Answerable] = []
        self._slow: dict[object, None] = {}
        self._closing = False
        self._closed = False
        self._sleeping = 0  # functions that sleep in a wait of ours
        self._leader: _Follower | None = None
        self.ready: deque[Job] = deque()
        """What is to be run. The leader appends what it reads; others use `submit`."""
        self.asleep = False
        """The leader waits for something to come, and cannot be stuck."""

    # From any thread

    def start(self) -> None:
        """Starts the first thread, which leads."""
        self._replace_leader(still_running=False)

    def submit(self, job: Job) -> None:
        """Has the job run in the pool soon."""
        self.ready.append(job)
        if self._closed:
            self._run_the_rest()
        else:
            self._poller.ring()

    def is_busy(self) -> bool:
        """Whether anything runs or is to be run."""
        leader = self._leader
        return bool(self.ready or self._running or self._sleeping or (leader is not None and leader.lead.is_running()))

    def thread_idents(self) -> list[int | None]:
        """Of the threads that there are now."""
        with self._lock:
            return [thread.ident for thread in self._threads]

    def depose_stuck_leader(self) -> None:
        """For the supervisor: if the leader's function has been running since the last look, another thread leads."""
        leader = self._leader
        if leader is not None and leader.lead.is_stuck() and leader.lead.depose():
            self._replace_leader(still_running=True)

    def close(self, deadline: float) -> list[str]:
        """Ends the threads, those that run a user's function as soon as it ends. Who is left at the deadline."""
        with self._lock:
            self._closing = True
            idle, self._idle = self._idle, []
        for follower in idle:
            follower.tell(_EXIT)
        self._poller.ring()
        left = []
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - monotonic()))
                if thread.is_alive():
                    left.append(thread.name)
        self._closed = True
        self._run_the_rest()
        return left

    def _run_the_rest(self) -> None:
        while self.ready:
            try:
                job = self.ready.popleft()
            except IndexError:
                return
            if job.must_run:
                job.run()

    # The leader

    def _lead(self, lead: Lead) -> bool:
        """Leads until deposed (True: this thread follows now) or until the pool closes (False)."""
        ready = self.ready
        unflushed = self._unflushed
        slow = self._slow
        done = 0
        while not self._closing:
            if not ready or self._running >= self._limit:
                if unflushed:
                    self._flush()
                done = 0
                self._handle_events()
                continue
            lead.begin()  # before the job is taken: at no moment does it seem that nothing is to be done
            try:
                job = ready.popleft()
            except IndexError:  # a follower took it
                if not lead.end():
                    return True
                continue
            kind = job.kind
            if kind in slow:
                if lead.end():
                    self._replace_leader(still_running=True)
                self._run_as_follower(job)
                return True
            began = perf_counter()
            reply = job.run()
            took = perf_counter() - began
            if not lead.end():
                self._note_slow(kind)
                self._answer(job, reply)
                return True
            if took > SLOW:
                self._note_slow(kind)
            origin = job.origin
            del job  # what it holds must not live on until there is another
            if reply is not None:
                assert origin is not None
                if type(reply) is not bytes:
                    origin.answer(reply)  # large: not to be kept back, and its buffers are the user's to change
                    reply = None
                    continue
                origin.queue_answer(reply)
                if not unflushed or unflushed[-1] is not origin:
                    unflushed.append(origin)
                done += 1
                if done >= _BURST:
                    self._flush()
                    done = 0
        self._flush()
        return False

    def _handle_events(self) -> None:
        """Waits until something comes, spinning at first, and handles it."""
        poll = self._poller.poll
        # With functions running in other threads of this process, spinning would fight them for the interpreter.
        events = [] if self._running else self._spinning.look(poll)
        if not events:
            self.asleep = True
            events = poll(-1)
            self.asleep = False
            self._wake_supervisor()
        handlers = self._poller.handlers
        for descriptor, what in events:
            handler = handlers.get(descriptor)
            if handler is not None:
                try:
                    handler(what)
                except Exception:  # a handler deals with its own errors; one that does not must not end the service
                    logger.exception("worker %r: reading from a connection failed", self._name)

    def _flush(self) -> None:
        unflushed = self._unflushed
        while unflushed:
            try:
                origin = unflushed.pop()
            except IndexError:
                return
            origin.flush_answers()

    def _note_slow(self, kind: object) -> None:
        if len(self._slow) > 1024:
            self._slow.clear()
        self._slow[kind] = None

    def _replace_leader(self, still_running: bool) -> None:
        """The lead was given up or taken: another thread gets it. `still_running`: the old leader's function counts."""
        with self._lock:
            if still_running:
                self._running += 1
            if self._closing:
                return
            leader = self._idle.pop() if self._idle else self._new_follower()
            self._leader = leader
        self._flush()
        leader.tell(_LEAD)

    # The followers

    def _run_as_follower(self, job: Job) -> None:
        began = perf_counter()
        reply = job.run()
        if perf_counter() - began < SLOW / 2:
            self._slow.pop(job.kind, None)
        self._answer(job, reply)

    def _answer(self, job: Job, reply: Reply | None) -> None:
        if reply is not None:
            assert job.origin is not None
            job.origin.answer(reply)

    def _follow(self, follower: _Follower) -> bool:
        """After a job: runs what is ready, as far as the limit allows. Whether the thread may sleep, or must end."""
        while True:
            with self._lock:
                self._running -= 1
                job = self._take_job()
                if job is None:
                    if self._closing or len(self._idle) >= self._limit:
                        return False
                    self._idle.append(follower)
                    return True
            self._run_as_follower(job)
            job = None  # what it holds must not live on until there is another

    def _take_job(self) -> Job | None:
        """A job, and a place among the running, if there are both. Under the lock."""
        leader = self._leader
        led = leader is not None and leader.lead.is_running()  # its function counts, though it is not in `_running`
        if self._running + led < self._limit and self.ready:
            try:
                job = self.ready.popleft()
            except IndexError:
                return None
            self._running += 1
            return job
        return None

    def _new_follower(self) -> _Follower:
        self._numbered += 1
        follower = _Follower()
        thread = threading.Thread(
            target=self._live, args=(follower,), name=f"farcall-{self._name}-{self._numbered}", daemon=True
        )
        self._threads.add(thread)
        thread.start()
        return follower

    def _live(self, follower: _Follower) -> None:
        """The life of a thread: sleep, lead or run, sleep again."""
        blocking_thread.before = lambda: self._before_sleep(follower)
        blocking_thread.after = lambda: self._after_sleep(follower)
        try:
            while True:
                order = follower.listen(monotonic() + _IDLE_LIFE)
                if order is None and not self._may_retire(follower):
                    continue
                if order is None or order is _EXIT:
                    return
                if not isinstance(order, _Order):
                    self._run_as_follower(order)
                elif not self._lead(follower.lead):
                    return
                order = None  # what a job holds must not live on while its thread sleeps
                if not self._follow(follower):
                    return
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _may_retire(self, follower: _Follower) -> bool:
        """A thread that nobody needed for a while ends, unless it has just been told something."""
        with self._lock:
            if follower in self._idle:
                self._idle.remove(follower)
                return True
            return False

    # A function of this pool sleeps in a wait of ours

    def _before_sleep(self, follower: _Follower) -> None:
        follower.depth += 1
        if follower.depth > 1:
            return
        with self._lock:
            self._sleeping += 1
        if follower.lead.depose():
            self._replace_leader(still_running=False)
            return
        order = None
        with self._lock:
            self._running -= 1
            if self._idle or not self._closing:
                order = self._take_job()
                if order is not None:
                    helper = self._idle.pop() if self._idle else self._new_follower()
        if order is not None:
            helper.tell(order)

    def _after_sleep(self, follower: _Follower) -> None:
        follower.depth -= 1
        if follower.depth == 0:
            with self._lock:
                self._sleeping -= 1
                self._running += 1


class _Order:
    """What a follower is told to do, other than to run a job."""


_LEAD: Final = _Order()
_EXIT: Final = _Order()


class _Follower:
    """One thread of the pool, and how it is told what to do."""

    __slots__ = ("_gate", "_order", "depth", "lead")

    def __init__(self) -> None:
        self._gate = Gate()
        self._order: Job | _Order | None = None
        self.lead = Lead()
        self.depth = 0  # how many waits of ours its function sleeps in; a callback may wait inside a wait

    def tell(self, order: Job | _Order) -> None:
        """Wakes it with something to do. Only for a thread that was taken from the idle ones, or is new."""
        self._order = order
        self._gate.open()

    def listen(self, deadline: float) -> Job | _Order | None:
        """Sleeps until told something, or until the deadline."""
        self._gate.rest(deadline)
        order, self._order = self._order, None
        return order
