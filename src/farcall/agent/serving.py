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
- State is changed under the lock; threads are woken, made and run outside it. The lock may be taken twice by one
  thread: a finalizer that waits may come in between.
- A thread that is to take over is had before the lead is given up: if the system has none to give, the leader leads on,
  and the supervisor tries again.
- Whatever escapes from a job is told to who waits for it, and logged. The thread goes on, and the accounts are right.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import monotonic, perf_counter, sleep
from typing import Any, Final

from farcall.agent.follower import EXIT, LEAD, Follower, Order
from farcall.agent.hot_rings import HotRings
from farcall.agent.jobs import AfterwardsJob, Answerable, Awaited, Job, Reply
from farcall.agent.leading import SLOW, SlowKinds
from farcall.agent.poller import Poller
from farcall.agent.spinning import Dozing, Spinning
from farcall.errors import UsageError
from farcall.sleeping import blocking_thread
from farcall.transports.rings import rest

logger = logging.getLogger("farcall")

_BURST: Final = 64
_IDLE_LIFE: Final = 10.0
_PAUSE: Final = 0.01
"""Before a leader that failed goes on: what made it fail may be there still."""


class Serving:
    """The serving pool of one agent."""

    def __init__(self, name: str, poller: Poller, limit: int, spinning: Spinning, quicken: Callable[[], None]) -> None:
        self._name, self._poller, self._limit, self._spinning = name, poller, limit, spinning
        self.after_large = spinning.after_large
        """See `Spinning.after_large`."""
        self._wake_supervisor = quicken
        self._lock = threading.RLock()
        self._idle: list[Follower] = []  # the one that slept last wakes first: its stack is warm
        self._threads: set[threading.Thread] = set()
        self._numbered = self._running = 0  # the latter: functions that run, and do not sleep, in followers
        self._unflushed: list[Answerable] = []
        self._slow = SlowKinds()
        self._closed = self.is_closing = False  # the latter: the threads are about to end
        self._dozing = False  # the leader's function has come to wait, most likely for a moment only
        self._sleeping = 0  # functions that sleep in a wait of ours
        self._leader: Follower | None = None
        self._supervised = False  # the supervisor was woken since the leader slept last
        self._lacks_threads = False  # the last one could not be started
        self.ready: deque[Job] = deque()
        """What is to be run. The leader appends what it reads; others use `submit`."""
        self.hot = HotRings()
        """Where the leader looks besides."""
        self.asleep = False
        """The leader waits for something to come, and cannot be stuck."""

    # From any thread

    def start(self) -> None:
        """Starts the first thread, which leads. `RuntimeError` if the system has no thread to give."""
        self._leader = self._new_follower()
        self._leader.tell(LEAD)

    def submit(self, job: Job) -> None:
        """Has the job run in the pool soon."""
        self.ready.append(job)
        if self._closed:
            self._run_the_rest()
        else:
            self._poller.ring()

    def run_aside(self, job: Job) -> None:
        """Has the job run at once, though as many functions run as may: for what must not wait for users' functions."""
        follower = None if self.is_closing else self._have_follower()
        if follower is None:
            self.submit(job)
        else:
            follower.tell(job)

    def afterwards(self, chore: Callable[[], None]) -> None:
        """For a function that runs here: has that done as soon as its reply has gone; at once if it does not lead."""
        if self._leader_here() is None:
            chore()
        else:
            self.ready.appendleft(AfterwardsJob(chore, self._flush))

    def is_busy(self) -> bool:
        """Whether anything runs or is to be run."""
        with self._lock:
            leader = self._leader
            leads = leader is not None and leader.lead.is_running()
            return bool(self.ready or self._running or self._sleeping or leads)

    def thread_idents(self) -> list[int | None]:
        """Of the threads that there are now."""
        with self._lock:
            return [thread.ident for thread in self._threads]

    def counts(self) -> dict[str, int]:
        """What the pool is busy with now, by the names in `Metrics`."""
        with self._lock:
            leads = self._leader is not None and self._leader.lead.is_running()
            return {
                "queue_length": len(self.ready),
                "threads": len(self._threads),
                "threads_running": self._running + leads,
                "threads_waiting": self._sleeping,
                "threads_idle": len(self._idle),
            }

    def depose_stuck_leader(self) -> None:
        """For the supervisor: if the leader's function has been running since the last look, another thread leads."""
        leader = self._leader
        if leader is not None and leader.lead.is_stuck():
            self._replace(leader)

    def close(self, deadline: float) -> list[str]:
        """Ends the threads, those that run a user's function as soon as it ends. Who is left at the deadline.

        May be called again, by who was interrupted in it.
        """
        with self._lock:
            self.is_closing = True
            while self._idle:
                self._idle[-1].tell(EXIT)  # before it is forgotten: Ctrl-C may come in between, and this be done again
                self._idle.pop()
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
                try:
                    job.run()
                except BaseException as error:
                    self._escaped(job, error)

    # The leader

    def _lead(self, follower: Follower) -> bool:
        """Leads until deposed (True: this thread follows now) or until the pool closes (False)."""
        lead = follower.lead
        ready = self.ready
        unflushed = self._unflushed
        slow = self._slow
        done = 0
        while not self.is_closing:
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
            if kind in slow and self._replace(follower):
                self._run_as_follower(job, follower)
                return True
            follower.rested = 0.0
            began = perf_counter()
            try:
                reply = job.run()
            except BaseException as error:
                reply = self._escaped(job, error)
            took = perf_counter() - began - follower.rested
            if took > SLOW:
                slow.note(kind)
            if not lead.end():
                if not follower.rested:  # it was seen to be slow, and did not come to wait
                    slow.note(kind)
                self._answer(job, reply)
                return True
            origin = job.origin
            del job  # what it holds must not live on until there is another
            if reply is not None:
                assert origin is not None
                if type(reply) is not bytes:
                    origin.answer(reply)  # large: not to be kept back, and its buffers are the user's to change
                    reply = None
                else:
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
        rings = self.hot.rings
        events = rest(rings) if self._running else self._spinning.look(poll, rings)
        if not events:
            self.asleep = True
            began = monotonic()
            events = poll(-1)
            self.asleep = False
            self._spinning.slept(monotonic() - began)
            self._supervised = False
        handlers = self._poller.handlers
        for descriptor, what in events:
            handler = handlers.get(descriptor)
            if handler is not None:
                try:
                    handler(what)
                except BaseException:  # a handler deals with its own errors; one that does not must not end the service
                    logger.exception("worker %r: reading from a connection failed", self._name)
        if not self._supervised and self.ready:
            # Not for each heartbeat that comes: only functions may prove slow.
            self._supervised = True
            self._wake_supervisor()

    def _flush(self) -> None:
        unflushed = self._unflushed
        while unflushed:
            try:
                origin = unflushed.pop()
            except IndexError:
                return
            origin.flush_answers()

    def _replace(self, leader: Follower) -> bool:
        """Another thread leads from now on, if the leader runs a function still and a thread can be had."""
        successor = self._have_follower()
        if successor is None:
            return False
        with self._lock:
            counts = not leader.depth  # its function does not sleep
            self._running += counts
            replaced = not self.is_closing and leader.lead.depose()
            if replaced:
                leader.counted = counts
                self._leader = successor
            else:
                self._running -= counts
                self._put_back(successor)
        if replaced:
            try:
                self._flush()
            finally:
                successor.tell(LEAD)
        return replaced

    def _escaped(self, job: Job, error: BaseException) -> Reply | None:
        """What a job should not have raised: for the log, and in the reply."""
        try:
            logger.error("worker %r: a job of kind %r failed", self._name, job.kind, exc_info=error)
        finally:
            return job.failed(error) if isinstance(job, Awaited) else None  # noqa: B012 (memory may be short)

    # The followers

    def _run_as_follower(self, job: Job, follower: Follower) -> None:
        follower.rested = 0.0
        began = perf_counter()
        try:
            reply = job.run()
        except BaseException as error:
            reply = self._escaped(job, error)
        if perf_counter() - began - follower.rested < SLOW / 2:
            self._slow.pop(job.kind, None)
        self._answer(job, reply)

    def _answer(self, job: Job, reply: Reply | None) -> None:
        if reply is not None:
            assert job.origin is not None
            job.origin.answer(reply)

    def _follow(self, follower: Follower) -> bool:
        """After a job: runs what is ready, as far as the limit allows. Whether the thread may sleep, or must end."""
        while True:
            with self._lock:
                self._running -= follower.counted
                follower.counted = False
                job = None if self._dozing else self._take_job(follower)
                if job is None:
                    if self.is_closing or len(self._idle) >= self._limit:
                        return False
                    self._idle.append(follower)
                    return True
            self._run_as_follower(job, follower)
            job = None  # what it holds must not live on until there is another

    def _has_place(self) -> bool:
        """Whether something is to be run and may be. Under the lock."""
        leader = self._leader
        led = leader is not None and leader.lead.is_running()  # its function counts, though it is not in `_running`
        return self._running + led < self._limit and bool(self.ready)

    def _take_job(self, follower: Follower) -> Job | None:
        """A job for that thread, and a place among the running, if there are both. Under the lock."""
        if not self._has_place():
            return None
        try:
            job = self.ready.popleft()
        except IndexError:
            return None
        self._running += 1
        follower.counted = True
        return job

    def _have_follower(self) -> Follower | None:
        """An idle thread or a new one; None if the system has none to give. To be told something, or put back."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            follower = self._new_follower()
        except (RuntimeError, MemoryError) as error:
            if not self._lacks_threads:
                logger.warning("worker %r cannot start another thread to serve with: %s", self._name, error)
            self._lacks_threads = True
            return None
        self._lacks_threads = False
        return follower

    def _new_follower(self) -> Follower:
        """Not under the lock: much is made here, and whenever something is made finalizers may run."""
        with self._lock:
            self._numbered += 1
            number = self._numbered
        follower = Follower()
        thread = threading.Thread(
            target=self._live, args=(follower,), name=f"farcall-{self._name}-{number}", daemon=True
        )
        thread.start()
        self._threads.add(thread)
        return follower

    def _put_back(self, follower: Follower) -> None:
        """It is not needed after all. Under the lock."""
        if self.is_closing:
            follower.tell(EXIT)
        else:
            self._idle.append(follower)

    def _live(self, follower: Follower) -> None:
        """The life of a thread: sleep, lead or run, sleep again."""
        follower.thread = get_ident()
        blocking_thread.before = lambda: self._before_sleep(follower)
        blocking_thread.after = lambda: self._after_sleep(follower)
        try:
            while True:
                order = follower.listen(monotonic() + _IDLE_LIFE)
                if order is None and not self._may_retire(follower):
                    continue
                if order is None or order is EXIT:
                    return
                go_on = self._obey(follower, order)
                order = None  # what a job holds must not live on while its thread sleeps
                if not go_on:
                    return
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _obey(self, follower: Follower, order: Job | Order | None) -> bool:
        """Does as told, and then what is ready. Whether the thread may sleep, or must end."""
        while True:
            try:
                if order is LEAD:
                    if not self._lead(follower):
                        return False
                elif order is not None:
                    self._run_as_follower(order, follower)  # type: ignore[arg-type]  # EXIT does not come here
                order = None
                return self._follow(follower)
            except BaseException:  # nothing should come here; if it does, the service must not end
                order = None
                logger.exception("worker %r: a thread that serves failed, and goes on", self._name)
                with self._lock:
                    follower.lead.end()
                    if self._leader is follower and not self.is_closing:
                        order = LEAD
                sleep(_PAUSE)

    def _may_retire(self, follower: Follower) -> bool:
        """A thread that nobody needed for a while ends, unless it has just been told something."""
        with self._lock:
            if follower in self._idle:
                self._idle.remove(follower)
                return True
            return False

    # A function of this pool sleeps in a wait of ours

    def doze(self, dozing: Dozing, poll: Callable[[int], Any]) -> Any:
        """See `Dozing.doze`, for the leader's function. Nothing in another thread: it has no lead to give away.

        While the leader dozes, nobody else takes what is ready: it will be back in a moment, and one thread that does
        it all costs less than two that take turns.
        """
        leader = self._leader_here()
        if leader is None:
            return None
        began, self._dozing = perf_counter(), True
        try:
            return dozing.doze(poll)
        finally:
            self._dozing = False
            leader.rested += perf_counter() - began

    def _leader_here(self) -> Follower | None:
        """This thread, if it runs a function as the leader."""
        leader = self._leader
        return leader if leader is not None and leader.thread == get_ident() and leader.lead.is_running() else None

    def _before_sleep(self, follower: Follower) -> None:
        if follower.depth:
            follower.depth += 1
            return
        with self._lock:
            leads = follower.lead.is_running()
            if self._leader is follower and not leads:
                raise UsageError(
                    "a finalizer cannot wait for a call here: it interrupts the thread that reads for all others; "
                    "use rpc_async in it"
                )
            follower.depth = 1
            follower.rested -= perf_counter()
            self._sleeping += 1
            self._running -= follower.counted
            follower.counted = False
        try:
            if leads:
                self._replace(follower)
            else:
                self._fill_place()
        except BaseException:
            self._after_sleep(follower)
            raise

    def _fill_place(self) -> None:
        """A function that ran has come to sleep: another thread runs what is ready."""
        with self._lock:
            if self.is_closing or self._dozing or not self._has_place():
                return
        helper = self._have_follower()
        if helper is None:
            self._poller.ring()  # the leader runs it then
            return
        with self._lock:
            job = self._take_job(helper)
            if job is None:
                self._put_back(helper)
        if job is not None:
            helper.tell(job)

    def _after_sleep(self, follower: Follower) -> None:
        if follower.depth > 1:
            follower.depth -= 1
            return
        with self._lock:
            follower.depth = 0
            follower.rested += perf_counter()
            if not follower.lead.is_running():  # no thread could be had for the lead: it is the leader still
                self._running += 1
                follower.counted = True
            self._sleeping -= 1
