"""Starts the workers of a group, brings their output, passes signals on, and sees to it that all of them end.

One thread and one loop, in which everything is an event: output of a worker, room in a stream, a signal (SIGCHLD tells
of a worker's end), a time that has come. Rules:

- The first worker that fails decides how the run ended. The others are asked to end (SIGTERM) and, after the grace,
  killed. If a signal such as Ctrl-C has been passed on just before, they have been asked already, so the SIGTERM waits
  for one more grace.
- A worker that said that it failed because of another (`last_words`) decides only if, for a while, no worker fails for
  a reason of its own.
- A worker is its process group. When the worker itself has ended, what is left of the group is asked to end and,
  after the grace, killed.
- Signals from a keyboard (SIGINT, SIGQUIT) go to a worker's whole group, as a terminal would send them; the others go
  to the worker alone, whose children may not expect them. A second SIGINT kills.
- Every wait has an end. What survives SIGKILL is named and left.
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

from farcall.cli.output import SINK_IS_FULL, Sink, WorkerStream, make_prefixes, open_sinks, wants_colour
from farcall.cli.process import Keeper, WorkerPlan, WorkerProcess, describe_end, exit_status, live_groups
from farcall.cli.signals import ASKING_TO_END, FROM_A_KEYBOARD, PASSED_ON, signals_as_bytes
from farcall.last_words import LAUNCHER, Ear

_AFTER_KILL: Final = 5.0
_LOOK_AT_GROUPS: Final = 0.02
_CAUSE_ENDS_WITHIN: Final = 5.0
"""Seconds after the end of a worker that failed because of another, within which that other should end, too."""


class _Next(Enum):
    """What a worker has coming when its time (`_Worker.due`) is over."""

    NOTHING = auto()
    ASK = auto()
    KILL = auto()
    LEAVE = auto()


class _Worker:
    """A worker that is not gone yet, and what it has coming."""

    def __init__(self, process: WorkerProcess, streams: list[WorkerStream]) -> None:
        self.process = process
        self.streams = streams
        self.code: int | None = None
        """How the worker itself ended. It stays here until the rest of its group is gone, too."""
        self.rest_asked = False
        self.next = _Next.NOTHING
        self.due = math.inf

    def plan(self, what: _Next, due: float) -> None:
        self.next = what
        self.due = due


class Supervisor:
    """Runs one group of workers to its end. To be used once, by the main thread."""

    def __init__(self, plans: Sequence[WorkerPlan], grace: float, environ: Mapping[str, str] = os.environ) -> None:
        self._plans = plans
        self._grace = grace
        self._out, self._err = open_sinks()
        names = [plan.name for plan in plans]
        self._out_prefixes = make_prefixes(names, wants_colour(self._out.fd, environ))
        self._err_prefixes = make_prefixes(names, wants_colour(self._err.fd, environ))
        self._workers: list[_Worker] = []
        self._selector = selectors.PollSelector()  # not epoll: that takes no regular file, and stdout may be one
        self._status: int | None = None
        self._heard: set[int] = set()
        self._victim: tuple[int, str] | None = None
        self._victim_decides_at = math.inf
        self._signalled_at = -math.inf
        self._interrupts = 0
        self._flush_until = math.inf

    def run(self) -> int:
        """Starts the workers and stays until all are gone; gives the exit status of the run."""
        with ExitStack() as stack:
            stack.enter_context(self._selector)
            signals = stack.enter_context(signals_as_bytes())
            self._selector.register(signals, selectors.EVENT_READ, partial(self._take_signals, signals))
            self._ear = Ear()
            stack.callback(self._ear.close)
            self._selector.register(self._ear, selectors.EVENT_READ, self._listen)
            self._keeper = Keeper()
            stack.callback(self._keeper.close)
            stack.callback(self._abandon)
            self._start()
            while self._is_busy():
                self._step()
        return self._status or 0

    def _start(self) -> None:
        for index, plan in enumerate(self._plans):
            environment = {**plan.environment, LAUNCHER: self._ear.name}
            try:
                process = WorkerProcess(replace(plan, environment=environment))
            except OSError as error:
                self._fail(1, f"cannot start {plan.name} (rank {plan.rank}): {error}")
                return
            self._keeper.watch(process)
            output, errors = process.outputs
            streams = [
                WorkerStream(output, self._out_prefixes[index], self._out),
                WorkerStream(errors, self._err_prefixes[index], self._err),
            ]
            self._workers.append(_Worker(process, streams))

    def _is_busy(self) -> bool:
        if self._workers:
            return True
        return any(sink.pending for sink in self._sinks()) and time.monotonic() < self._flush_until

    def _step(self) -> None:
        self._watch()
        for key, _ in self._selector.select(self._time_left()):
            key.data()
        self._notice_ends()
        self._notice_empty_groups()
        self._do_what_is_due()
        if self._status is None and any(sink.broken for sink in self._sinks()):
            # Nobody reads us any more (`farcall run ... | head`): end as any program would.
            self._fail(128 + signal.SIGPIPE)

    def _sinks(self) -> set[Sink]:
        return {self._out, self._err}

    def _time_left(self) -> float | None:
        due = min([worker.due for worker in self._workers], default=self._flush_until)
        if self._status is None:
            due = min(due, self._victim_decides_at)
        if any(worker.code is not None for worker in self._workers):
            due = min(due, time.monotonic() + _LOOK_AT_GROUPS)  # nobody tells us when a descendant ends
        return None if due == math.inf else max(0.0, due - time.monotonic())

    # -- output

    def _watch(self) -> None:
        """Watches the outputs for which there is room, and the streams for which there is something to write."""
        for sink in self._sinks():
            watched = sink.fd in self._selector.get_map()
            if sink.pending and not watched:
                self._selector.register(sink.fd, selectors.EVENT_WRITE, sink.write_some)
            elif watched and not sink.pending:
                self._selector.unregister(sink.fd)
        for worker in self._workers:
            for stream in worker.streams:
                room = len(stream.sink.pending) < SINK_IS_FULL
                if room and not stream.watched:
                    self._selector.register(
                        stream.file, selectors.EVENT_READ, partial(self._read_or_close, worker, stream)
                    )
                elif stream.watched and not room:
                    self._selector.unregister(stream.file)
                stream.watched = room

    def _read_or_close(self, worker: _Worker, stream: WorkerStream) -> None:
        if not stream.read():
            self._close(worker, stream)

    def _close(self, worker: _Worker, stream: WorkerStream) -> None:
        if stream.watched:
            self._selector.unregister(stream.file)
        stream.close()
        worker.streams.remove(stream)

    def _say(self, text: str) -> None:
        self._err.put(f"farcall run: {text}\n".encode(errors="surrogateescape"))

    # -- signals

    def _take_signals(self, fd: int) -> None:
        for number in os.read(fd, 1 << 12):
            if number in PASSED_ON:
                self._pass_on(signal.Signals(number))

    def _pass_on(self, number: signal.Signals) -> None:
        if number in ASKING_TO_END:
            self._signalled_at = time.monotonic()
            if not self._workers:
                self._flush_until = self._signalled_at  # somebody wants us gone, and only the flushing is left
        if number == signal.SIGINT and self._workers:
            self._interrupts += 1
            if self._interrupts > 1:
                self._kill_all_at_once()
                return
        for worker in self._workers:
            if number in FROM_A_KEYBOARD:
                worker.process.signal_group(number)
            elif worker.code is None:
                worker.process.signal(number)
        if number == signal.SIGINT and self._workers:
            self._say(f"interrupted: told {_count(len(self._workers))}; interrupt again to kill")

    def _kill_all_at_once(self) -> None:
        self._say(f"interrupted twice: killing {_count(len(self._workers))}")
        self._fail(128 + signal.SIGINT)
        for worker in self._workers:
            self._kill(worker)

    # -- ends

    def _notice_ends(self) -> None:
        running = [worker for worker in self._workers if worker.code is None]
        for worker in running:
            worker.code = worker.process.poll()
        self._listen()  # after the look: who has ended has said by now whether it was a consequence
        for worker in running:
            if worker.code:  # neither running still nor ended well
                for stream in worker.streams:
                    stream.drain()  # its last words come before ours
                self._judge(worker, exit_status(worker.code), f"{worker.process} {describe_end(worker.code)}")
        if self._victim is not None and self._status is None:
            alone = all(worker.code is not None for worker in self._workers)
            if alone or time.monotonic() >= self._victim_decides_at:
                self._fail(*self._victim)

    def _listen(self) -> None:
        self._heard |= self._ear.listen()

    def _judge(self, worker: _Worker, status: int, reason: str) -> None:
        if worker.process.pid not in self._heard:
            self._fail(status, reason)
        elif self._victim is None:
            self._victim = status, reason
            self._victim_decides_at = time.monotonic() + _CAUSE_ENDS_WITHIN

    def _fail(self, status: int, reason: str | None = None) -> None:
        """Ends the run with this status, unless it is ending already."""
        if self._status is not None:
            return
        self._status = status
        others = [worker for worker in self._workers if worker.code is None]
        if reason is not None:
            self._say(f"{reason}; ending {_count(len(others), 'other ')}" if others else reason)
        for worker in others:
            worker.plan(_Next.ASK, max(time.monotonic(), self._signalled_at + self._grace))

    def _notice_empty_groups(self) -> None:
        ended = [worker for worker in self._workers if worker.code is not None]
        if not ended:
            return
        alive = live_groups()
        for worker in ended:
            if worker.process.pid not in alive:
                self._let_go(worker)
            elif not worker.rest_asked and worker.next is not _Next.LEAVE:
                worker.rest_asked = True
                worker.process.signal_group(signal.SIGTERM)
                worker.plan(_Next.KILL, time.monotonic() + self._grace)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.due <= now]:
            who = str(worker.process) if worker.code is None else f"what {worker.process} had started"
            if worker.next is _Next.ASK:
                worker.process.signal(signal.SIGTERM)
                worker.plan(_Next.KILL, now + self._grace)
            elif worker.next is _Next.KILL:
                self._say(f"{who} did not end within {self._grace:g} s: killing it")
                self._kill(worker)
            else:
                self._say(f"{who} survives SIGKILL: leaving it behind")
                self._let_go(worker)

    def _kill(self, worker: _Worker) -> None:
        worker.process.signal_group(signal.SIGKILL)
        worker.plan(_Next.LEAVE, time.monotonic() + _AFTER_KILL)

    def _let_go(self, worker: _Worker, within: float = 0.0) -> None:
        for stream in list(worker.streams):
            self._close(worker, stream)
        self._keeper.forget(worker.process)
        worker.process.reap(within)
        self._workers.remove(worker)
        if not self._workers and self._signalled_at > -math.inf:
            self._flush_until = time.monotonic() + self._grace

    def _abandon(self) -> None:
        """Leaves no worker behind if the loop itself fails."""
        for worker in list(self._workers):
            worker.process.signal_group(signal.SIGKILL)
            self._let_go(worker, _AFTER_KILL)


def _count(number: int, kind: str = "") -> str:
    return f"the {kind}worker" if number == 1 else f"the {number} {kind}workers"
