"""The executor: the threads that read the requests of other workers and run them.

One thread, the *leader*, waits on the poller, reads requests and runs them itself. So a call that returns at once costs
no thread switch. A second thread, the *standby* thread, sleeps. It is woken when a frame arrives while the leader runs
a function (`transports.poller` describes how). If the leader still runs the same job `GRACE_S` later, or its function
waits for a call of its own, the standby thread becomes the leader, and another thread becomes the standby thread. The
old leader finishes its function, and is a follower from then on.

Rules
- There is at most one leader. `_leader` is its thread ident, or 0 if there is none. Then the standby thread becomes the
  leader as soon as there is something to read.
- At most `max_running` functions run at once. A function that waits for a call of its own does not count, so nested
  calls of any depth end, whatever the limit is.
- Jobs start in the order in which they were added.
- The number of the leader's job and the state of the poller are changed together, under one lock. If the standby thread
  saw only one of the changes, it could take the lead from a leader that has finished its job, or writers to rings could
  wake the wrong thread.
- The standby thread clears its alert before it checks for work, so frames that arrive after the check wake it again.
- User code never runs under the lock.

`tests/native/lead.pml` is a model of this machine, the poller and the senders, which `make model` checks with SPIN.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import monotonic, sleep
from typing import TYPE_CHECKING, Final, Protocol

from farcall.current import serving
from farcall.errors import UsageError
from farcall.gate import blocking_thread
from farcall.transports.poller import Poller

if TYPE_CHECKING:
    from farcall.backends.interface import RpcAgent

logger = logging.getLogger("farcall")

GRACE_S: Final = 1e-3
"""How long the leader may run one function while frames wait to be read."""
_IDLE_LIFE_S: Final = 10.0
"""How long a thread stays idle before it ends."""
_PAUSE_S: Final = 0.01
"""How long a leader pauses after an error, because the same error may come again at once."""


class Job(Protocol):
    """A piece of work that a thread of the executor runs.

    `must_run` says whether the job is run even after the executor was closed.
    """

    must_run: bool

    def run(self) -> None:
        """Runs the job. The executor logs errors that it raises."""


class Task:
    """A job that calls a function of the runtime, not of a user.

    Args:
        function: The function to call, without arguments.
        must_run: Whether the job is run even after the executor was closed.
    """

    __slots__ = ("_function", "must_run")

    def __init__(self, function: Callable[[], object], must_run: bool = False) -> None:
        self._function = function
        self.must_run = must_run

    def run(self) -> None:
        """Calls the function. The executor logs errors that it raises."""
        self._function()


class _ThreadState(threading.local):
    """What the executor knows about the current thread.

    `depth` is the number of nested waits of the thread: a callback that runs in a wait may wait, too.
    """

    depth = 0


class Executor:
    """The threads that read and run the requests of one worker: a leader, a standby thread and followers.

    The leader reads requests and runs them itself. The standby thread sleeps. It becomes the leader if the leader runs
    one function for too long, or if that function waits for a call of its own. The old leader finishes its function,
    and is a follower from then on: it runs queued requests, but reads none. When none is queued, it is idle, and may
    become the standby thread later.

    The executor has no threads before `start`.

    Args:
        name: The name of this worker, for the names of threads and for messages.
        poller: Waits until frames have arrived.
        max_running: How many functions may run at once. Functions that wait for a call of their own do not count.
        agent: The agent that is the current one in all threads of the executor.
    """

    def __init__(self, name: str, poller: Poller, max_running: int, agent: RpcAgent) -> None:
        self._name = name
        self._agent = agent
        self._poller = poller
        self._max_running = max_running
        self._lock = threading.Lock()
        self.ready: deque[Job] = deque()
        """Jobs to run. The leader appends the requests that it reads; other threads use `submit`."""
        self._leader = 0
        self._run = 0  # the number of the leader's job; 0 if it runs none
        self._runs = itertools.count(1)
        self._running = 0  # functions that run and do not wait
        self._waiting = 0  # functions that wait for calls of their own
        self._standing_by = threading.Lock()  # held by the standby thread; other idle threads wait for it
        self._idle = 0  # the standby thread, and the threads that wait to be it
        self._threads: set[threading.Thread] = set()
        self._asides: set[threading.Thread] = set()
        self._thread_numbers = itertools.count(1)
        self._state = _ThreadState()
        self.is_closing = False
        """Whether `close` was called."""
        self._is_closed = False
        self._lacks_threads = False

    # From any thread

    def start(self) -> None:
        """Starts the leader and the standby thread. Raises `RuntimeError` if the system cannot create a thread."""
        self._start_thread()
        self._start_thread()

    def submit(self, job: Job) -> None:
        """Queues a job, and wakes a thread to run it if necessary. Does not wait.

        Before `start`, the job stays in the queue. After `close`, runs the job at once on the calling thread if
        `must_run` is set, and drops it otherwise.
        """
        self.ready.append(job)
        if self._is_closed:
            self._run_the_rest()
        elif self._run or not self._leader:
            self._poller.wake_standby()
        elif self._leader != get_ident():
            self._poller.wake()

    def run_aside(self, function: Callable[[], object]) -> None:
        """Runs a function of the runtime that may block, in a new thread. Does not wait. Errors are logged.

        If the system cannot create a thread, queues the function as a job instead. Does nothing after `close` was
        called.
        """

        def run() -> None:
            serving.agent = self._agent
            try:
                function()
            except BaseException:
                logger.exception("worker %r: a task of the runtime failed", self._name)
            finally:
                self._asides.discard(threading.current_thread())

        if self.is_closing:
            return
        thread = threading.Thread(target=run, name=f"farcall-{self._name}-aside", daemon=True)
        self._asides.add(thread)
        try:
            thread.start()
        except RuntimeError:  # no thread can be created
            self._asides.discard(thread)
            self.submit(Task(function))

    def is_busy(self) -> bool:
        """Returns whether jobs are queued, running, or waiting for calls of their own."""
        with self._lock:
            return bool(self.ready or self._running or self._waiting)

    def counts(self) -> dict[str, int]:
        """Returns the number of queued jobs (`queue_length`) and the number of threads (`threads`).

        Also returns how many functions run (`threads_running`), how many functions wait for calls of their own
        (`threads_waiting`), and how many threads are idle (`threads_idle`).
        """
        with self._lock:
            return {
                "queue_length": len(self.ready),
                "threads": len(self._threads),
                "threads_running": self._running,
                "threads_waiting": self._waiting,
                "threads_idle": self._idle,
            }

    def thread_idents(self) -> list[int]:
        """Returns the idents of the executor's threads, except those of `run_aside`; empty before `start`."""
        return [thread.ident for thread in list(self._threads) if thread.ident is not None]

    # Threads

    def _start_thread(self) -> None:
        """Starts an idle thread. Raises `RuntimeError` if the system cannot create one."""
        thread = threading.Thread(
            target=self._live, name=f"farcall-{self._name}-{next(self._thread_numbers)}", daemon=True
        )
        with self._lock:
            self._idle += 1
            self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            with self._lock:
                self._idle -= 1
                self._threads.discard(thread)
            raise

    def _live(self) -> None:
        """The function of a thread: becomes the standby thread, then the leader, then a follower, and so on.

        The thread ends when the executor closes, or when it was idle for `_IDLE_LIFE_S` seconds and is not the only
        idle one.
        """
        blocking_thread.before = self._before_wait
        blocking_thread.after = self._after_wait
        serving.agent = self._agent
        try:
            while not self.is_closing:
                if not self._standing_by.acquire(timeout=_IDLE_LIFE_S):
                    if self._retire():
                        return
                    continue
                try:
                    leads = self._stand_by()
                finally:
                    self._standing_by.release()
                if not leads:
                    return
                self._see_to_successor()
                self._lead_in_any_case()
                self._follow()
                with self._lock:
                    self._idle += 1
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _retire(self) -> bool:
        """Returns whether the calling idle thread should end: True if there is another idle thread.

        If True, the calling thread does not count as idle any more. If False, it still does.
        """
        with self._lock:
            if self._idle <= 1:
                return False
            self._idle -= 1
            return True

    def _see_to_successor(self) -> None:
        """Called by a new leader: starts a thread if no thread is idle. Logs a warning if that is not possible."""
        if self._idle:
            return
        try:
            self._start_thread()
            self._lacks_threads = False
        except (RuntimeError, MemoryError) as error:
            if not self._lacks_threads:
                logger.warning("worker %r cannot start another thread to serve with: %s", self._name, error)
            self._lacks_threads = True

    def _stand_by(self) -> bool:
        """Waits until this thread becomes the leader, and returns True. Returns False if the executor closes."""
        poller, run_before = self._poller, 0
        while not self.is_closing:
            poller.clear_alert()
            with self._lock:
                run = self._run
                if not self._leader or (run and run == run_before):
                    self._leader, self._run = get_ident(), 0
                    self._idle -= 1
                    return True
            run_before = run
            if run or poller.has_rare_events():
                sleep(GRACE_S)  # the leader should handle it within that time
            else:
                poller.stand_by()
        with self._lock:
            self._idle -= 1
        return False

    # Leading

    def _lead_in_any_case(self) -> None:
        """Calls `_lead` until it returns normally. After an error, logs it and tries again after a short pause.

        Returns after an error if another thread has taken the lead.
        """
        while True:
            try:
                self._lead()
                return
            except BaseException:
                logger.exception("worker %r: the thread that reads failed, and goes on", self._name)
                with self._lock:
                    self._run = 0
                    if self._leader != get_ident():
                        return
                sleep(_PAUSE_S)

    def _lead(self) -> None:
        """Reads requests and runs jobs, until another thread has taken the lead or the executor closes."""
        me, ready, poller, lock = get_ident(), self.ready, self._poller, self._lock
        while not self.is_closing:
            while ready:
                with lock:
                    # Under the lock: a follower may start a job at this moment.
                    if self._running >= self._max_running:
                        break
                    self._run = next(self._runs)
                    self._running += 1
                    poller.run(len(ready) > 1)
                if poller.must_send:
                    poller.send_collected()
                job = None
                try:
                    job = ready.popleft()
                    job.run()
                except BaseException:
                    self._log_failure(job)
                job = None  # release what the job refers to now, not when the next job comes
                with lock:
                    self._running -= 1
                    if self._leader != me:
                        if self._leader:
                            return  # another thread is the leader
                        self._leader = me  # the job gave up the lead to wait, and no other thread took it
                    self._run = 0
            for handler in poller.wait(None):
                try:
                    handler()
                except BaseException:  # handlers catch their own errors; this is in case one does not
                    logger.exception("worker %r: reading from a link failed", self._name)

    def _log_failure(self, job: Job | None) -> None:
        """Logs the current exception as the failure of `job`.

        Does nothing if `job` is None: then another thread had taken the job before, which is no failure.
        """
        if job is not None:
            logger.exception("worker %r: a job failed", self._name)

    def _run_job(self) -> None:
        """Runs the first queued job, and logs its errors. Does nothing if no job is queued."""
        try:
            job = self.ready.popleft()
        except IndexError:  # another thread has taken it
            return
        try:
            job.run()
        except BaseException:
            logger.exception("worker %r: a job failed", self._name)

    # Following

    def _follow(self) -> None:
        """Runs queued jobs on a thread that has just lost the lead to another thread.

        Returns when no job is queued, `max_running` functions run, there is no leader, or the executor closes.
        """
        while True:
            with self._lock:
                if self.is_closing or not self.ready or self._running >= self._max_running:
                    return
                if not self._leader:
                    return  # this thread or the standby thread becomes the leader and runs the jobs
                self._running += 1
            self._run_job()
            with self._lock:
                self._running -= 1

    # A function waits for a call of its own

    def _before_wait(self) -> None:
        """Called on a thread of the executor before it sleeps in a wait of farcall.

        If the thread is the leader, it gives up the lead. The function that it runs does not count as running until
        `_after_wait`. A wait inside of another wait changes nothing.

        Raises:
            UsageError: The thread is the leader and runs no job: a finalizer that wants to wait has interrupted it.
        """
        state = self._state
        if state.depth:
            state.depth += 1
            return
        me = get_ident()
        with self._lock:
            leads = self._leader == me
            if leads and not self._run:
                raise UsageError(
                    "a finalizer cannot wait for a call here: it interrupts the thread that reads for all others; "
                    "use rpc_async in it"
                )
            state.depth = 1
            self._running -= 1
            self._waiting += 1
            if leads:
                self._leader = self._run = 0
                self._poller.block(bool(self.ready))
                return
            has_place = bool(self.ready) and self._running < self._max_running
        if has_place:
            self._poller.wake()  # the leader may run it now

    def _after_wait(self) -> None:
        """Called on a thread of the executor after it has slept in a wait of farcall.

        The function that the thread runs counts as running again. This method does not make the thread the leader
        again. After a wait inside of another wait, changes nothing.
        """
        state = self._state
        if state.depth > 1:
            state.depth -= 1
            return
        with self._lock:
            state.depth = 0
            self._waiting -= 1
            self._running += 1

    # The end

    def close(self, deadline: float) -> int:
        """Ends the threads, and waits for that. A thread that runs a function ends when the function ends.

        Queued jobs with `must_run` are run by the calling thread, and all others are dropped. May be called twice.

        Args:
            deadline: Until when to wait, as a time of the monotonic clock. Does not wait if it has passed.

        Returns:
            The number of threads that still run then, without the calling thread; 0 if all have ended.
        """
        self.is_closing = True
        me = threading.current_thread()
        while True:
            left = [each for each in [*self._threads, *self._asides] if each is not me and each.is_alive()]
            if not left or monotonic() >= deadline:
                break
            self._poller.wake()
            self._poller.wake_standby()
            left[0].join(min(0.01, max(0.0, deadline - monotonic())))
        self._is_closed = True
        self._run_the_rest()
        return len(left)

    def _run_the_rest(self) -> None:
        """Empties the queue after `close`: runs the jobs that have `must_run` set, and drops all others."""
        while self.ready:
            try:
                job = self.ready.popleft()
            except IndexError:
                return
            if job.must_run:
                try:
                    job.run()
                except BaseException:
                    logger.exception("worker %r: a job failed", self._name)
