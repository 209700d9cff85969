from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from farcall.launcher.worker_process import Keeper, WorkerPlan, WorkerProcess, describe_end, exit_status, live_groups

Start = Callable[[str], WorkerProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a worker that is a shell script; all of them are gone afterwards."""
    with ExitStack() as stack:

        def start(script: str) -> WorkerProcess:
            plan = WorkerPlan("worker2", 2, ["/bin/sh", "-c", script], {**os.environ, "WHO": "me"})
            process = WorkerProcess(plan)
            stack.callback(end, process)
            return process

        yield start


def end(process: WorkerProcess) -> None:
    if process._popen.returncode is None:
        process.signal_group(signal.SIGKILL)
        wait_for(process)
        process.reap()
    for output in process.outputs:
        output.close()


def wait_for(process: WorkerProcess) -> None:
    """Until the worker has ended; it is not reaped."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("code", "said", "status"),
    [
        (0, "exited with status 0", 0),
        (3, "exited with status 3", 3),
        (-9, "was killed by SIGKILL", 137),
        (-15, "was killed by SIGTERM", 143),
        (-40, "was killed by signal 40", 168),
    ],
)
def test_an_end_in_words_and_as_a_status(code: int, said: str, status: int) -> None:
    assert describe_end(code) == said
    assert exit_status(code) == status


def test_a_worker_has_its_environment_two_outputs_and_no_input(start: Start) -> None:
    process = start("read line || echo $WHO; echo wrong >&2")
    output, errors = process.outputs
    assert output.read() == b"me\n"
    assert errors.read() == b"wrong\n"


def test_a_worker_leads_its_own_session(start: Start) -> None:
    process = start("echo; exec sleep 600")
    process.outputs[0].read(1)
    assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), ("kill -USR1 $$", -10)])
def test_the_end_is_told_and_told_again_until_it_is_reaped(start: Start, script: str, code: int) -> None:
    process = start(script)
    wait_for(process)
    assert process.poll() == code
    assert process.poll() == code
    process.signal(signal.SIGTERM)  # its number is still its own
    process.reap()
    with pytest.raises(ChildProcessError):
        process.poll()


def test_a_running_worker_has_no_end_yet(start: Start) -> None:
    process = start("exec sleep 600")
    assert process.poll() is None


def test_a_signal_to_the_group_reaches_what_the_worker_has_started(start: Start) -> None:
    process = start("sleep 600 & echo; wait")
    process.outputs[0].read(1)
    process.signal_group(signal.SIGKILL)
    assert process.outputs[0].read() == b""  # at the end of the pipe all who held it are gone
    wait_for(process)
    assert process.poll() == -signal.SIGKILL


def test_a_signal_to_the_worker_is_not_for_what_it_has_started(start: Start) -> None:
    process = start("sleep 600 & echo; wait")
    process.outputs[0].read(1)
    process.signal(signal.SIGKILL)
    wait_for(process)
    assert process.pid in live_groups()


def test_a_group_of_zombies_is_not_alive(start: Start) -> None:
    process = start("exit 0")
    wait_for(process)
    assert process.pid not in live_groups()
    assert os.getpgrp() in live_groups()


def test_a_worker_is_named_with_rank_and_pid(start: Start) -> None:
    process = start("exit 0")
    assert str(process) == f"worker2 (rank 2, pid {process.pid})"


def test_a_keeper_that_is_closed_kills_what_was_not_forgotten(start: Start) -> None:
    watched, forgotten = start("exec sleep 600"), start("exec sleep 600")
    keeper = Keeper()
    keeper.watch(watched)
    keeper.watch(forgotten)
    keeper.forget(forgotten)
    keeper.close()
    wait_for(watched)
    assert watched.poll() == -signal.SIGKILL
    assert forgotten.poll() is None


def test_a_keeper_that_was_killed_is_no_matter(start: Start) -> None:
    keeper = Keeper()
    keeper._popen.kill()
    keeper._popen.wait()
    keeper.watch(start("exit 0"))
    keeper.close()


def test_a_keeper_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.launcher.worker_process._KEEPER_TIMEOUT_S", 0.05)
    keeper = Keeper()
    keeper._popen.send_signal(signal.SIGSTOP)
    keeper.close()
    assert keeper._popen.returncode == -signal.SIGKILL


def test_a_program_that_is_not_there_is_told_by_the_worker_itself() -> None:
    process = WorkerProcess(WorkerPlan("w", 0, ["/nowhere/python"], os.environ))
    try:
        assert process.outputs[1].read() == b"cannot run /nowhere/python: No such file or directory\n"
        wait_for(process)
        assert process.poll() == 1
    finally:
        end(process)
