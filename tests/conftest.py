"""Every test is checked for what it leaves behind.

Looked at before and after each test: threads; file descriptors of sockets, pipes, memfds and whatever is anonymous
(eventfd, epoll, timerfd ...); child processes, zombies too; entries in /dev/shm; the files of unix sockets. What is
there after and was not there before is a leak, and the test that made it fails at its teardown. Nothing is excused.

- Something that is just ending gets `GRACE` seconds to be gone, so tests need not wait for it.
- The check stands around everything of function scope: the test and its fixtures. Fixtures of a wider scope are set up
  before it and taken down after it, so what they hold open is theirs, by design (ask for them as parameters, not by
  `request.getfixturevalue` inside the test).
- A test that failed is not checked: its traceback keeps alive whatever it had open.
- Socket files: this process gets a temporary directory of its own, so what is in it is ours. Child processes have the
  usual one: a killed worker leaves its socket behind for the next to clear away, and that is no leak.
"""

from __future__ import annotations

import gc
import glob
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

import farcall as rpc
import ports
from farcall.testing.local import TRANSPORTS

pytest.register_assert_rewrite("farcall.testing.conformance")

GRACE = 2.0
"""Seconds that a leftover has to be gone."""

_KINDS = ("socket:", "pipe:", "anon_inode:", "/memfd:")
_failed = pytest.StashKey[bool]()

Leftover = tuple[Any, ...]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport", choices=TRANSPORTS, default="unix", help="what connects the workers in tests/behaviour"
    )


def pytest_collection_finish() -> None:
    # What was imported stays. The collector, which many tests ask to look for what they have left, need not look
    # through all of it each time.
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    # The secret of whoever runs the tests is theirs: nothing here makes or reads the file of a user by accident.
    os.environ.setdefault("FARCALL_SECRET", "the secret of all tests")
    # Tests fork processes that have threads, on purpose: what farcall does in the child is what they test. Since 3.12
    # Python warns of that; pyproject.toml says the same for this process.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:This process:DeprecationWarning")
    # Who runs the tests in the background (`&` in a script, nohup) has them ignore some signals, and all processes that
    # they start too. What is tested here is what a program does that a person started.
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    tmp_path_factory.getbasetemp()  # pytest's own directories stay where they are used to be
    usual = tempfile.tempdir
    tempfile.tempdir = tempfile.mkdtemp(prefix="fc-")  # short: a socket's path has some 100 bytes at most
    try:
        yield
    finally:
        shutil.rmtree(tempfile.tempdir)
        tempfile.tempdir = usual


@pytest.fixture(scope="session", autouse=True)
def _multiprocessing_resource_tracker() -> None:
    # One per process, started on first use and there to the end: it must not look like the leak of that first test.
    resource_tracker.ensure_running()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _nothing_left_behind(
    request: pytest.FixtureRequest, _own_temporary_directory: None, _multiprocessing_resource_tracker: None
) -> Iterator[None]:
    before = look_around()
    yield
    if request.node.stash.get(_failed, False):
        return
    leftovers = wait_for_leftovers_to_go(before)
    if leftovers:
        pytest.fail("the test left behind: " + "; ".join(map(describe, sorted(leftovers, key=str))), pytrace=False)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Runs what waits, so that the test can go on."""
    with ThreadPoolExecutor(32) as pool:
        yield pool


@pytest.fixture
def free_port() -> int:
    """A port that nobody had a moment ago."""
    return ports.free_port()


@pytest.fixture
def alone(free_port: int) -> Iterator[None]:
    """This process is the worker "alone" of a group of one."""
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port}", init_timeout=10)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    yield
    rpc.shutdown()


def look_around() -> set[Leftover]:
    """All that could be left behind and is there now."""
    return {*_threads(), *_descriptors(), *_children(), *_shared_memory(), *_socket_files()}


def wait_for_leftovers_to_go(before: set[Leftover]) -> set[Leftover]:
    """What is there, was not there before, and does not go within the grace."""
    deadline = time.monotonic() + GRACE
    while leftovers := look_around() - before:
        if time.monotonic() > deadline:
            return {leftover for leftover in leftovers if not _is_of_another_process(leftover)}
        gc.collect()  # only now: for a test that leaves nothing it would cost more than the rest
        time.sleep(0.005)  # nothing tells when a descriptor, a file or another's child is gone: it has to be looked for
    return set()


def describe(leftover: Leftover) -> str:
    """For the reader of the failed test."""
    match leftover:
        case "thread", threading.Thread() as thread:
            return f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"
        case "descriptor", number, target:
            return f"file descriptor {number} ({target})"
        case "process", pid:
            command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
            return f"process {pid} ({command or 'a zombie: nobody waited for it'})"
        case kind, path:
            return f"{kind} {path}"
    raise AssertionError(leftover)


def _threads() -> Iterator[Leftover]:
    for thread in threading.enumerate():
        yield "thread", thread


def _descriptors() -> Iterator[Leftover]:
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the one by which the directory was listed
        if target.startswith(_KINDS):
            yield "descriptor", int(number), target


def _children() -> Iterator[Leftover]:
    for task in os.listdir("/proc/self/task"):
        for pid in _read(f"/proc/self/task/{task}/children").split():
            yield "process", int(pid)


def _shared_memory() -> Iterator[Leftover]:
    for name in os.listdir("/dev/shm"):
        yield "shared memory", f"/dev/shm/{name}"


def _socket_files() -> Iterator[Leftover]:
    own = os.path.join(glob.escape(tempfile.gettempdir()), f"farcall-{os.geteuid()}")
    # The directory of all the user's sockets may stay; one that was made for a single socket may not.
    for path in (*glob.iglob(f"{own}/*"), *glob.iglob(f"{own}-*")):
        yield "socket file", path


def _is_of_another_process(leftover: Leftover) -> bool:
    """Whether another program made it. /dev/shm belongs to the whole machine; this is looked up only in need."""
    match leftover:
        case "shared memory", path if path.startswith("/dev/shm/sem."):
            # The name of a semaphore outlives a process that was killed. So one that none of our processes has mapped
            # says nothing about this test: any program on the machine that uses multiprocessing makes them.
            return not any(_has_mapped(pid, path) for pid in _own_processes())
        case "shared memory", path:
            own = set(_own_processes())
            others = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()} - own
            return any(_has_mapped(pid, path) for pid in others)
    return False


def _has_mapped(pid: int, path: str) -> bool:
    """Whether that process has the file in its memory: by its inode, as sem_open maps a file before it names it."""
    try:
        inode = os.stat(path).st_ino
    except FileNotFoundError:
        return False
    lines = (line.split(maxsplit=5) for line in _read(f"/proc/{pid}/maps").splitlines() if "/dev/shm/" in line)
    return any(int(fields[4]) == inode for fields in lines)


def _own_processes() -> Iterator[int]:
    """This process and all that descend from it."""
    found = [os.getpid()]
    for pid in found:
        for task in glob.glob(f"/proc/{pid}/task/*/children"):
            found.extend(map(int, _read(task).split()))
        yield pid


def _read(path: str) -> str:
    """The text of a file in /proc; none if the process or thread is gone, or not ours."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
