"""The leak check bites: pytest is run on tests that leak, each in another way, and on tests that do not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LEAKING_TESTS = '''
import contextlib, multiprocessing, os, select, socket, subprocess, tempfile, threading
import conftest, pytest

conftest.GRACE = 0.1

@pytest.fixture(scope="module")
def later():
    """What is left to this is leaked as far as a test is concerned, and cleared away after all of them."""
    with contextlib.ExitStack() as stack:
        yield stack

def test_nothing():
    with socket.socket():
        pass

def test_thread(later):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="straggler", daemon=True)
    thread.start()
    later.callback(thread.join)
    later.callback(stop.set)

def test_socket(later):
    later.enter_context(socket.socket())

def test_pipe(later):
    for end in os.pipe():
        later.callback(os.close, end)

def test_eventfd(later):
    later.callback(os.close, os.eventfd(0))

def test_epoll(later):
    later.enter_context(select.epoll())

def test_memfd(later):
    later.callback(os.close, os.memfd_create("some"))

def test_process(later):
    process = later.enter_context(subprocess.Popen(["sleep", "600"]))
    later.callback(process.kill)

def test_zombie(later):
    process = later.enter_context(subprocess.Popen(["true"]))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

def test_shared_memory(later):
    path = f"/dev/shm/farcall-test-{os.getpid()}"
    open(path, "x").close()
    later.callback(os.unlink, path)

def test_semaphore(later):
    kept = multiprocessing.get_context("spawn").Semaphore()
    later.callback(kept.__repr__)

def test_semaphore_of_another_program(later):
    path = f"/dev/shm/sem.another-{os.getpid()}"
    open(path, "x").close()
    later.callback(os.unlink, path)

def test_socket_file(later):
    directory = os.path.join(tempfile.gettempdir(), f"farcall-{os.geteuid()}")
    os.makedirs(directory)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/forgotten.sock")

def test_thread_that_is_just_ending():
    conftest.GRACE = 30.0
    threading.Timer(0.05, lambda: None).start()

def test_cycle_that_is_only_garbage():
    end = os.eventfd(0)
    class Holder:
        def __del__(self):
            os.close(end)
    holder = Holder()
    holder.itself = holder

@pytest.fixture(scope="module")
def wide():
    with socket.socket() as held:
        yield held

def test_fixture_of_wider_scope(wide):
    pass

def test_that_fails():
    kept_by_the_traceback = os.eventfd(0)
    assert not kept_by_the_traceback
'''


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of the tests above; one run for all."""
    directory = tmp_path_factory.mktemp("leaks")
    for name in ("conftest.py", "ports.py"):
        shutil.copy(Path(__file__).with_name(name), directory)
    (directory / "test_leaks.py").write_text(LEAKING_TESTS)
    (directory / "pytest.ini").write_text("[pytest]\n")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "test_leaks.py"],
        cwd=directory,
        env={**os.environ, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


def outcomes(report: str, test: str) -> list[str]:
    """The lines of the summary that are about this test, each with its outcome first."""
    return re.findall(rf"^(?:PASSED|FAILED|ERROR) test_leaks\.py::{test}\b.*$", report, re.MULTILINE)


@pytest.mark.parametrize(
    ("test", "left"),
    [
        ("test_thread", r"thread 'straggler' \(daemon\)"),
        ("test_socket", r"file descriptor \d+ \(socket:\[\d+\]\)"),
        ("test_pipe", r"file descriptor \d+ \(pipe:\[\d+\]\); file descriptor \d+ \(pipe:\[\d+\]\)"),
        ("test_eventfd", r"file descriptor \d+ \(anon_inode:\[eventfd\]\)"),
        ("test_epoll", r"file descriptor \d+ \(anon_inode:\[eventpoll\]\)"),
        ("test_memfd", r"file descriptor \d+ \(/memfd:some \(deleted\)\)"),
        ("test_process", r"process \d+ \(sleep 600\)"),
        ("test_zombie", r"process \d+ \(a zombie: nobody waited for it\)"),
        ("test_shared_memory", r"shared memory /dev/shm/farcall-test-\d+"),
        ("test_semaphore", r"shared memory /dev/shm/sem\.\S+"),
        ("test_socket_file", r"socket file \S+/forgotten\.sock"),
    ],
)
def test_a_leak_is_an_error_that_names_it(report: str, test: str, left: str) -> None:
    passed, error = outcomes(report, test)
    assert passed.startswith("PASSED")
    assert re.fullmatch(rf"ERROR \S+ - Failed: the test left behind: {left}", error)


@pytest.mark.parametrize(
    "test",
    [
        "test_nothing",
        "test_thread_that_is_just_ending",
        "test_cycle_that_is_only_garbage",
        "test_fixture_of_wider_scope",
        "test_semaphore_of_another_program",
    ],
)
def test_what_is_no_leak_passes(report: str, test: str) -> None:
    assert outcomes(report, test) == [f"PASSED test_leaks.py::{test}"]


def test_a_failed_test_is_not_accused_of_what_its_traceback_keeps(report: str) -> None:
    (outcome,) = outcomes(report, "test_that_fails")
    assert outcome.startswith("FAILED")
