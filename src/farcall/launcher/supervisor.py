"""Starts the workers of a group, copies their output, forwards signals, and makes sure that all of them end.

One thread runs one event loop. Events are: output of a worker, room in one of the launcher's streams, a signal (SIGCHLD
reports the end of a worker), an exit report, and deadlines.

Rules
- The first worker that fails decides the exit status of the run. The other workers get SIGTERM and, after the grace
  period, SIGKILL. If a signal such as Ctrl-C was forwarded just before, the workers know already that they should end,
  so the SIGTERM waits for one more grace period.
- A worker that reported that it failed because of another one (`exit_report`) decides only if no worker fails for
  another reason within `_CAUSE_WAIT_S`.
- A worker is its process group. When the worker's first process has ended, what is left of its group gets SIGTERM and,
  after the grace period, SIGKILL.
- Signals from a keyboard (SIGINT, SIGQUIT) go to the whole group of each worker, as a terminal would send them. Other
  signals go to the worker's first process only, because its children may not expect them. A second SIGINT kills.
- Every wait ends. A process that survives SIGKILL is reported and left behind.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Final

from farcall.launcher.exit_report import LAUNCHER_VARIABLE, ExitReports
from farcall.launcher.output import SINK_FULL_BYTES, Sink, WorkerStream, make_prefix, open_sinks, wants_colour
from farcall.launcher.signals import END_SIGNALS, FORWARDED_SIGNALS, KEYBOARD_SIGNALS, signals_as_bytes
from farcall.launcher.worker_process import Keeper, WorkerPlan, WorkerProcess, describe_end, exit_status, live_groups

_KILL_WAIT_S: Final = 5.0
"""How many seconds a process group may take to end after SIGKILL."""
_GROUP_POLL_INTERVAL_S: Final = 0.02
"""How often process groups are checked, since no event reports the end of a descendant."""
_CAUSE_WAIT_S: Final = 5.0
"""How many seconds to wait for the worker that is the cause, after one has failed because of another."""


class _NextAction(Enum):
    """What happens to a worker when its deadline (`_Worker.due`) is reached.

    `NOTHING` means that no deadline is set. `ASK` sends SIGTERM, `KILL` sends SIGKILL, and `LEAVE` gives up on a
    process that has survived SIGKILL.
    """

    NOTHING = auto()
    ASK = auto()
    KILL = auto()
    LEAVE = auto()


class _Worker:
    """A worker whose process group has not ended yet, and what happens to it next.

    Args:
        process: Its process.
        streams: Its standard output and standard error.

    Attributes:
        process: Its process.
        streams: The streams that are still open.
        code: How its process ended: the exit status, or minus the signal that killed it; None while it runs.
        rest_asked: True once the rest of its process group was asked to end.
        next: What happens when `due` is reached.
        due: The moment of the next action, in seconds of `time.monotonic()`; infinity for never.
    """

    def __init__(self, process: WorkerProcess, streams: list[WorkerStream]) -> None:
        self.process = process
        self.streams = streams
        self.code: int | None = None
        """The result of `WorkerProcess.poll`.

        The worker is kept after its end until the rest of its group has ended, too.
        """
        self.rest_asked = False
        self.next = _NextAction.NOTHING
        self.due = math.inf

    def plan(self, what: _NextAction, due: float) -> None:
        """Sets the next action, and when it is due in seconds of `time.monotonic()`. Replaces the earlier plan."""
        self.next = what
        self.due = due


class Supervisor:
    """Starts the workers of one group and waits until all have ended. If one fails, ends the others.

    `Supervisor(plans, grace).run()` returns the exit status. Use it once, in the main thread.

    Args:
        plans: The workers to start, in the order of their ranks; at least one, else `ValueError` is raised.
        grace: Seconds between SIGTERM and SIGKILL; 0 or more, which is not checked.
        environ: The environment variables that tell whether the output is coloured: NO_COLOR, FORCE_COLOR and TERM.
    """

    def __init__(self, plans: Sequence[WorkerPlan], grace: float, environ: Mapping[str, str] = os.environ) -> None:
        """Prepares the run; nothing is started yet.

        Args:
            plans: The workers to start, in the order of their ranks; at least one, else `ValueError` is raised.
            grace: Seconds between SIGTERM and SIGKILL; 0 or more, which is not checked.
            environ: The environment variables that tell whether the output is coloured: NO_COLOR, FORCE_COLOR and TERM.

        Raises:
            OSError: Standard output or standard error of this process is closed.
        """
        self._plans = plans
        self._grace = grace
        self._out, self._err = open_sinks()
        # The width is not changed when a worker tells a longer name: the lines of the others would move.
        self._name_width = max(len(plan.name) for plan in plans)
        self._is_coloured = {sink: wants_colour(sink.fd, environ) for sink in (self._out, self._err)}
        self._workers: list[_Worker] = []
        self._selector = selectors.PollSelector()  # not epoll, which rejects regular files: stdout may be one
        self._status: int | None = None
        self._reported: set[int] = set()
        self._first_consequence: tuple[int, str] | None = None
        self._consequence_counts_at = math.inf
        self._signalled_at = -math.inf
        self._interrupts = 0
        self._flush_until = math.inf

    def run(self) -> int:
        """Starts the workers, waits until all have ended, and returns the exit status of the run.

        The status is 0 if all workers ended with 0, otherwise that of the first failure. A worker that cannot be
        started counts as a failure with status 1. A worker that a signal killed counts as 128 plus the number of the
        signal.

        Raises:
            ValueError: This is not the main thread.
            OSError: The system has no descriptors or processes left for the launcher itself. No worker was started.
        """
        with ExitStack() as stack:
            stack.enter_context(self._selector)
            signals = stack.enter_context(signals_as_bytes())
            self._selector.register(signals, selectors.EVENT_READ, partial(self._read_signals, signals))
            self._reports = ExitReports()
            stack.callback(self._reports.close)
            self._selector.register(self._reports, selectors.EVENT_READ, self._read_reports)
            self._keeper = Keeper()
            stack.callback(self._keeper.close)
            stack.callback(self._abandon)
            self._start()
            while self._is_busy():
                self._step()
        return self._status or 0

    def _start(self) -> None:
        """Starts the workers one after the other; the first that cannot be started ends the run with status 1.

        No more are started then, and those that run are asked to end.
        """
        for index, plan in enumerate(self._plans):
            environment = {**plan.environment, LAUNCHER_VARIABLE: self._reports.name}
            try:
                process = WorkerProcess(replace(plan, environment=environment))
            except OSError as error:
                self._fail(1, f"cannot start {plan.name} (rank {plan.rank}): {error}")
                return
            self._keeper.watch(process)
            output, errors = process.outputs
            streams = [
                WorkerStream(file, self._prefix(plan.name, index, sink), sink, self._read_reports)
                for file, sink in ((output, self._out), (errors, self._err))
            ]
            self._workers.append(_Worker(process, streams))

    def _prefix(self, name: str, index: int, sink: Sink) -> bytes:
        """Returns what to write before each line of a worker: its name and a bar, as in "worker1 | ".

        `index` is the number of the worker, from 0 on, which decides its colour. `sink` is the stream of the launcher
        to which the lines go: the name is coloured only if that stream shows colours.
        """
        return make_prefix(name, self._name_width, index, self._is_coloured[sink])

    def _is_busy(self) -> bool:
        """Returns True while workers are left, or while the launcher has output that it may still write; else False.

        Without workers, output may be written until `_flush_until`, a time of `time.monotonic()`.
        """
        if self._workers:
            return True
        return any(sink.pending for sink in self._sinks()) and time.monotonic() < self._flush_until

    def _step(self) -> None:
        """Waits for events or the next deadline, handles them, and returns after one round.

        Events are output of workers, room in the launcher's own streams, signals and reports. Without a deadline it
        waits until an event comes.
        """
        self._update_watches()
        for key, _ in self._selector.select(self._seconds_to_next_deadline()):
            key.data()
        self._handle_ended_workers()
        self._handle_ended_groups()
        self._act_on_deadlines()
        if self._status is None and any(sink.broken for sink in self._sinks()):
            # The reader of our output is gone (`farcall run ... | head`): end as any other program would.
            self._fail(128 + signal.SIGPIPE)

    def _sinks(self) -> set[Sink]:
        """Returns the launcher's streams: two, or one if standard output and standard error lead to the same place."""
        return {self._out, self._err}

    def _seconds_to_next_deadline(self) -> float | None:
        """Returns how many seconds the event loop may wait; 0 if a deadline has passed, None if there is none.

        While ended workers have process groups that must be checked, it is at most `_GROUP_POLL_INTERVAL_S`.
        """
        due = min([worker.due for worker in self._workers], default=self._flush_until)
        if self._status is None:
            due = min(due, self._consequence_counts_at)
        if any(worker.code is not None for worker in self._workers):
            due = min(due, time.monotonic() + _GROUP_POLL_INTERVAL_S)
        return None if due == math.inf else max(0.0, due - time.monotonic())

    # -- output

    def _update_watches(self) -> None:
        """Sets what the event loop waits for: output of workers, and room in the launcher's own streams.

        Output of a worker is watched while the launcher's stream for it has room. A stream of the launcher is watched
        while there are bytes to write to it.
        """
        for sink in self._sinks():
            watched = sink.fd in self._selector.get_map()
            if sink.pending and not watched:
                self._selector.register(sink.fd, selectors.EVENT_WRITE, sink.write_some)
            elif watched and not sink.pending:
                self._selector.unregister(sink.fd)
        for worker in self._workers:
            for stream in worker.streams:
                room = len(stream.sink.pending) < SINK_FULL_BYTES
                if room and not stream.watched:
                    self._selector.register(
                        stream.file, selectors.EVENT_READ, partial(self._read_or_close, worker, stream)
                    )
                elif stream.watched and not room:
                    self._selector.unregister(stream.file)
                stream.watched = room

    def _read_or_close(self, worker: _Worker, stream: WorkerStream) -> None:
        """Copies the output of a worker that is available now, and closes the stream at its end."""
        if not stream.read():
            self._close(worker, stream)

    def _close(self, worker: _Worker, stream: WorkerStream) -> None:
        """Copies what is left of a worker's stream, closes it, and removes it from the worker and the selector."""
        if stream.watched:
            self._selector.unregister(stream.file)
        stream.close()
        worker.streams.remove(stream)

    def _report(self, text: str) -> None:
        """Queues a line of the launcher's own for standard error: `farcall run: ` and `text`. Never waits."""
        self._err.put(f"farcall run: {text}\n".encode(errors="surrogateescape"))

    # -- signals

    def _read_signals(self, fd: int) -> None:
        """Reads the signals that have arrived on the pipe `fd`, one byte each, and forwards each to the workers.

        Ignores signals that are not forwarded, such as SIGCHLD. Waits if none has arrived.
        """
        for number in os.read(fd, 1 << 12):
            if number in FORWARDED_SIGNALS:
                self._forward(signal.Signals(number))

    def _forward(self, number: signal.Signals) -> None:
        """Forwards a signal to all workers; the second SIGINT kills them instead.

        SIGINT and SIGQUIT go to the whole process group of each worker, even if the worker itself has ended. Other
        signals go only to the workers that run. If no worker is left, a signal that asks to end makes the launcher
        discard its unwritten output.
        """
        if number in END_SIGNALS:
            self._signalled_at = time.monotonic()
            if not self._workers:
                self._flush_until = self._signalled_at  # only output is left to write: give up on it
        if number == signal.SIGINT and self._workers:
            self._interrupts += 1
            if self._interrupts > 1:
                self._kill_all()
                return
        for worker in self._workers:
            if number in KEYBOARD_SIGNALS:
                worker.process.signal_group(number)
            elif worker.code is None:
                worker.process.signal(number)
        if number == signal.SIGINT and self._workers:
            self._report(f"interrupted: forwarded to {_count(len(self._workers))}; interrupt again to kill")

    def _kill_all(self) -> None:
        """Kills all workers and their process groups now; the run gets the status 130 (SIGINT) if it has none yet."""
        self._report(f"interrupted twice: killing {_count(len(self._workers))}")
        self._fail(128 + signal.SIGINT)
        for worker in self._workers:
            self._kill(worker)

    # -- ends

    def _handle_ended_workers(self) -> None:
        """Finds the workers that have ended since the last call; if one of them failed, decides the status of the run.

        A worker that failed because of another worker does not decide at once. It decides when no worker runs any more,
        or `_CAUSE_WAIT_S` seconds later, unless another failure has decided by then. Nothing is decided if no worker
        has failed.
        """
        running = [worker for worker in self._workers if worker.code is None]
        for worker in running:
            worker.code = worker.process.poll()
        self._read_reports()  # after the poll, because a worker sends its report before it ends
        for worker in running:
            if worker.code:  # it has ended, and not with status 0
                for stream in worker.streams:
                    stream.drain()  # the worker's last output comes before our message about its end
                self._record_failure(worker, exit_status(worker.code), f"{worker.process} {describe_end(worker.code)}")
        if self._first_consequence is not None and self._status is None:
            alone = all(worker.code is not None for worker in self._workers)
            if alone or time.monotonic() >= self._consequence_counts_at:
                self._fail(*self._first_consequence)

    def _read_reports(self) -> None:
        """Reads the names and reports that workers have sent; does nothing if there are none. Never waits.

        A report says that a worker fails because of another one. A name that a worker has sent is written before its
        lines from now on. Call this after reading a worker's output and before copying it: then lines that follow the
        name in the output are copied with that name.
        """
        self._reported |= self._reports.read()
        for pid, name in self._reports.take_names().items():
            for worker in self._workers:
                if worker.process.pid == pid:
                    worker.process.name = name
                    index = next(i for i, plan in enumerate(self._plans) if plan.rank == worker.process.plan.rank)
                    for stream in worker.streams:
                        stream.set_prefix(self._prefix(name, index, stream.sink))

    def _record_failure(self, worker: _Worker, status: int, reason: str) -> None:
        """Ends the run with `status` because of a failed worker, and prints `reason`.

        If that worker has reported that it failed because of another one, the failure is only remembered. It counts if
        no other failure comes within `_CAUSE_WAIT_S` seconds.
        """
        if worker.process.pid not in self._reported:
            self._fail(status, reason)
        elif self._first_consequence is None:
            self._first_consequence = status, reason
            self._consequence_counts_at = time.monotonic() + _CAUSE_WAIT_S

    def _fail(self, status: int, reason: str | None = None) -> None:
        """Sets the exit status of the run, prints the reason unless it is None, and asks the other workers to end.

        The workers get SIGTERM. They get it now, or `grace` seconds after the launcher has forwarded a signal that asks
        to end, if that is later. Does nothing if the run has a status already: the first failure decides.
        """
        if self._status is not None:
            return
        self._status = status
        others = [worker for worker in self._workers if worker.code is None]
        if reason is not None:
            self._report(f"{reason}; ending {_count(len(others), 'other ')}" if others else reason)
        for worker in others:
            worker.plan(_NextAction.ASK, max(time.monotonic(), self._signalled_at + self._grace))

    def _handle_ended_groups(self) -> None:
        """Looks for processes that ended workers have left in their process groups, and asks them to end.

        A worker whose group is empty is removed. Otherwise the group gets SIGTERM once, and SIGKILL after the grace
        period. Does nothing if no worker has ended.
        """
        ended = [worker for worker in self._workers if worker.code is not None]
        if not ended:
            return
        alive = live_groups()
        for worker in ended:
            if worker.process.pid not in alive:
                self._remove(worker)
            elif not worker.rest_asked and worker.next is not _NextAction.LEAVE:
                worker.rest_asked = True
                worker.process.signal_group(signal.SIGTERM)
                worker.plan(_NextAction.KILL, time.monotonic() + self._grace)

    def _act_on_deadlines(self) -> None:
        """Carries out the next action of every worker whose deadline is over: SIGTERM, SIGKILL, or giving it up.

        Does nothing if there is no such worker.
        """
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.due <= now]:
            who = str(worker.process) if worker.code is None else f"a process started by {worker.process}"
            if worker.next is _NextAction.ASK:
                worker.process.signal(signal.SIGTERM)
                worker.plan(_NextAction.KILL, now + self._grace)
            elif worker.next is _NextAction.KILL:
                self._report(f"{who} did not end within {self._grace:g} s: killing it")
                self._kill(worker)
            else:
                self._report(f"{who} survived SIGKILL: leaving it behind")
                self._remove(worker)

    def _kill(self, worker: _Worker) -> None:
        """Sends SIGKILL to a worker's process group, which has `_KILL_WAIT_S` seconds to end before it is given up."""
        worker.process.signal_group(signal.SIGKILL)
        worker.plan(_NextAction.LEAVE, time.monotonic() + _KILL_WAIT_S)

    def _remove(self, worker: _Worker, within: float = 0.0) -> None:
        """Copies the last output of a worker, reaps it and forgets it.

        Args:
            worker: The worker, one of `_workers`.
            within: How many seconds to wait for its end; 0 does not wait. A worker that still runs then is left behind.
        """
        for stream in list(worker.streams):
            self._close(worker, stream)
        self._keeper.forget(worker.process)
        worker.process.reap(within)
        self._workers.remove(worker)
        if not self._workers and self._signalled_at > -math.inf:
            self._flush_until = time.monotonic() + self._grace

    def _abandon(self) -> None:
        """Kills and reaps the workers that are left; there are some only if the event loop has raised an error."""
        for worker in list(self._workers):
            worker.process.signal_group(signal.SIGKILL)
            self._remove(worker, _KILL_WAIT_S)


def _count(number: int, kind: str = "") -> str:
    """Returns `the worker` for 1, otherwise `the N workers`, also for 0.

    `kind`, for example `other ` with a blank at its end, goes before the noun.
    """
    return f"the {kind}worker" if number == 1 else f"the {number} {kind}workers"
