"""Engines: groups whose workers are started for the length of a `with` block.

    with farcall.engines.local(4) as group:
        group.worker("worker0").call(max, 1, 2)

`local` starts processes on this host, by multiprocessing's spawn method. As with every use of that method, the script
that enters the block must be importable: what starts the program goes below `if __name__ == "__main__":`.

Rules
- This process is a member of the group, too: `main`, with rank 0. The workers have the ranks from 1 on.
- A worker lives as long as its pipe from this process. At the end of the block all members leave together, gracefully.
  If an exception leaves the block, or this process dies, the pipes close and the workers end.
- A worker that cannot start (its script fails, say) is noticed before the group is joined.
- Every wait ends: a worker that does not end within `GRACE_S` is terminated, and then killed.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import signal
import tempfile
from copy import copy
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from farcall.errors import RendezvousError, ShutdownError, UsageError
from farcall.groups import Group
from farcall.options import DEFAULT_INIT_METHOD, RpcBackendOptions

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

logger = logging.getLogger("farcall")

GRACE_S: Final = 5.0
"""How many seconds a worker has to end by itself, before it is terminated."""
_KILL_WAIT_S: Final = 1.0
"""How many seconds a terminated worker has before it is killed, and a killed one before it is given up."""
_LEAVE: Final = "leave"
"""The message over a pipe that tells a worker to leave gracefully."""


def local(workers: int, *, name: str = "worker", options: RpcBackendOptions | None = None) -> Group:
    """Returns a group of new processes on this host, which start and end with its `with` block.

    Nothing is started before the block is entered. Entering raises `RendezvousError` if a worker cannot start or join
    in time, for example because its script fails.

    Args:
        workers: The number of processes to start, at least 1. This process is a member besides, named `main`, with rank
            0.
        name: The beginning of the workers' names, not empty. With "worker" they are `worker0`, `worker1` and so on.
            Names that are too long or not printable are refused by the workers, so entering the block fails.
        options: The options of all members; None for the defaults. `init_method` must not be set, because the engine
            chooses where the members find each other. An object of another type raises `AttributeError`.

    Raises:
        UsageError: `workers` is not a whole number of at least 1, `name` is not a str or is empty, or `options` has an
            `init_method`.

    Example:
        with farcall.engines.local(2) as group:
            group.worker("worker1").call(max, 1, 2)
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UsageError(f"the number of workers must be at least 1, not {workers!r}")
    if not isinstance(name, str) or not name:
        raise UsageError(f"the name of the workers must be a str that is not empty, not {name!r}")
    if options is not None and options.init_method != DEFAULT_INIT_METHOD:
        raise UsageError("the engine says where its workers find each other: leave init_method out of the options")
    return _LocalProcesses([f"{name}{number}" for number in range(workers)], options or RpcBackendOptions())


class _LocalProcesses(Group):
    """A group of this process, named `main`, and of processes that it starts on this host.

    The processes start when the `with` block of the group is entered, and end when it is left. Nothing is checked here.

    Args:
        names: The names of the workers to start, at least one, in the order of their ranks from 1 on.
        options: The options of all members. A secret is generated if neither they nor FARCALL_SECRET have one.
    """

    def __init__(self, names: list[str], options: RpcBackendOptions) -> None:
        secret = options.secret or os.environ.get("FARCALL_SECRET") or secrets.token_hex(32)
        self._plain_options = copy(options)
        self._plain_options.secret = None  # options with a secret cannot be pickled
        own = copy(options)
        own.secret = secret
        super().__init__("main", rank=0, world_size=len(names) + 1, options=own)
        self._own_options = own
        self._names = names
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._directory = ""

    def _join(self) -> None:
        """Starts the processes and joins the group. If either fails, ends the processes and raises the error.

        Raises `UsageError` if the processes run already, `RendezvousError` if a worker does not start or join within
        `init_timeout` seconds of the options, and `OSError` if the system cannot start a process.
        """
        if self._directory:
            raise UsageError("the workers of this group were started already; make another one")
        self._directory = tempfile.mkdtemp(prefix="farcall-")
        self._own_options.init_method = f"file://{self._directory}/store"
        try:
            self._start()
            super()._join()
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        """Starts the processes, and waits until each has imported the script of this process.

        Raises `RendezvousError` if a process ends before that, or has not imported the script after `init_timeout`
        seconds of the options. Raises `OSError` if the system cannot start a process. After an error, the caller must
        end the processes that were started.
        """
        import multiprocessing
        from multiprocessing import connection

        spawn = multiprocessing.get_context("spawn")
        atexit.register(self._close_pipes)  # before multiprocessing waits for the processes
        options = copy(self._plain_options)
        options.init_method = self._own_options.init_method
        for rank, name in enumerate(self._names, 1):
            ours, theirs = spawn.Pipe()
            self._pipes.append(ours)
            process = spawn.Process(
                target=_run_worker,
                args=(theirs, name, rank, len(self._names) + 1, options, self._own_options.secret),
                name=f"farcall-{name}",
            )
            try:
                process.start()
            finally:
                theirs.close()
            self._processes.append(process)
        deadline = monotonic() + self._own_options.init_timeout
        waited_for: dict[Any, str] = dict(zip(self._pipes, self._names, strict=True))
        while waited_for:
            ready: list[Any] = connection.wait(list(waited_for), max(0.0, deadline - monotonic()))
            if not ready:
                missing = ", ".join(map(repr, waited_for.values()))
                raise RendezvousError(f"worker {missing} did not start within {self._own_options.init_timeout:g} s")
            for pipe in ready:
                who = waited_for.pop(pipe)
                try:
                    pipe.recv()
                except EOFError:
                    raise RendezvousError(
                        f"worker {who!r} ended before it joined: it has printed why. The script that starts the "
                        'workers must be importable: put what starts it below `if __name__ == "__main__":`'
                    ) from None

    def _leave(self, graceful: bool) -> None:
        """Leaves the group and ends all processes.

        If `graceful` is True, this process and the workers wait until the work of all is done. If it is False, all
        leave at once. Raises `ShutdownError` if a graceful shutdown fails; but if a worker process had ended before,
        the error is only logged.
        """
        died = [process.name for process in self._processes if process.exitcode is not None]
        try:
            for pipe in self._pipes if graceful else ():
                try:
                    pipe.send(_LEAVE)
                except OSError:
                    pass  # that worker is gone
            if not graceful:
                self._close_pipes()
            super()._leave(graceful)
        except ShutdownError as error:
            if not died:
                raise
            # The calls to that worker have failed, so the program knows.
            logger.warning("the workers of the block could not leave together: %s", error)
        finally:
            self._end()

    def _end(self) -> None:
        """Ends all processes, and removes the directory of their rendezvous; does nothing if there are none.

        Closes the pipes, which asks the processes to end. A process that still runs after `GRACE_S` seconds is
        terminated, then killed. A process that survives is left behind.
        """
        self._close_pipes()
        atexit.unregister(self._close_pipes)
        deadline = monotonic() + GRACE_S
        for end in (lambda process: None, lambda process: process.terminate(), lambda process: process.kill()):
            left = [process for process in self._processes if process.exitcode is None]
            for process in left:
                end(process)
            for process in left:
                process.join(max(0.0, deadline - monotonic()))
            deadline = monotonic() + _KILL_WAIT_S
        for process in self._processes:
            if process.exitcode is not None:
                process.close()
        self._processes.clear()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = ""

    def _close_pipes(self) -> None:
        """Closes the pipes to the workers, which makes each leave the group at once and end. May be called again."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()


def _run_worker(pipe: Any, name: str, rank: int, world_size: int, options: RpcBackendOptions, secret: str) -> None:
    """The program of a worker process: joins the group, serves calls, and leaves when `pipe` says so or is closed.

    Returns when the group is left. Raises `RendezvousError` or `UsageError` if the group cannot be joined, which ends
    the process.

    Args:
        pipe: The connection to the process that has started this one. This process sends its name when it has imported
            the script. When it receives `_LEAVE`, it shuts down gracefully. When it receives anything else, or the pipe
            is closed, it shuts down at once.
        name: The name of this worker.
        rank: Its rank, from 1 on.
        world_size: The number of members of the group, the starting process included.
        options: Its options, without the secret.
        secret: The secret of the group.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has started this one
    pipe.send(name)
    options.secret = secret
    group = Group(name, rank=rank, world_size=world_size, options=options)
    group.__enter__()
    try:
        graceful = pipe.recv() == _LEAVE
    except (EOFError, OSError):
        graceful = False
    try:
        group.shutdown(graceful)
    except ShutdownError as error:  # the process that has started this one says it
        logger.info("%s", error)
