"""The supervisor with workers that are small shell scripts, in this process. Signals: tests/integration/test_run.py."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from farcall.launcher.supervisor import Supervisor
from farcall.launcher.worker_process import WorkerPlan, WorkerProcess

FOREVER = "exec sleep 600"
SAY_READY = "touch $0/ready"
WAIT_FOR_READY = "until [ -e $0/ready ]; do sleep 0.01; done"
SLEEP_ON = "while :; do sleep 0.02; done"


def supervise(*scripts: str, grace: float = 30.0, directory: object = ".") -> int:
    """Runs one worker for each script, which has the directory as $0."""
    plans = [
        WorkerPlan(f"w{rank}", rank, ["/bin/sh", "-c", script, str(directory)], {"PATH": os.environ["PATH"]})
        for rank, script in enumerate(scripts)
    ]
    return Supervisor(plans, grace, environ={}).run()


def without_pids(text: str) -> str:
    return re.sub(r"pid \d+", "pid N", text)


def test_all_end_well(capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise("echo one; echo odd >&2", "echo two") == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["w0 | one", "w1 | two"]
    assert err == "w0 | odd\n"


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("exit 3", 3, "w1 (rank 1, pid N) exited with status 3"),
        ("kill -9 $$", 137, "w1 (rank 1, pid N) was killed by SIGKILL"),
    ],
)
def test_the_first_that_fails_ends_the_others_and_decides(
    script: str, status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervise(FOREVER, script, FOREVER) == status
    assert without_pids(capfd.readouterr().err) == f"farcall run: {said}; ending the 2 other workers\n"


@pytest.mark.parametrize("ending", ["", r"\n"])
def test_the_last_words_of_the_one_that_failed_come_before_the_verdict(
    ending: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervise(f"printf 'last words{ending}' >&2; exit 1", FOREVER) == 1
    assert without_pids(capfd.readouterr().err) == (
        "w0 | last words\nfarcall run: w0 (rank 0, pid N) exited with status 1; ending the other worker\n"
    )


def test_the_last_words_come_first_even_if_the_end_is_noticed_before_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def wait_for_the_end(process: WorkerProcess) -> int | None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return poll(process)

    poll = WorkerProcess.poll
    monkeypatch.setattr(WorkerProcess, "poll", wait_for_the_end)
    # The first line wakes the supervisor, which then sees the end at once and has the second one still to read.
    assert supervise("echo up; sleep 0.1; echo last words >&2; exit 1") == 1
    assert without_pids(capfd.readouterr().err) == (
        "w0 | last words\nfarcall run: w0 (rank 0, pid N) exited with status 1\n"
    )


def test_how_the_others_end_then_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    patient = f"trap 'exit 7' TERM; {SAY_READY}; {SLEEP_ON}"
    assert supervise(patient, f"{WAIT_FOR_READY}; exit 3", directory=tmp_path) == 3
    assert capfd.readouterr().err.count("exited") == 1


def test_one_that_does_not_want_to_end_is_killed_after_the_grace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    deaf = f"trap '' TERM; {SAY_READY}; {SLEEP_ON}"
    assert supervise(deaf, f"{WAIT_FOR_READY}; exit 3", grace=0.1, directory=tmp_path) == 3
    assert "w0 (rank 0, pid N) did not end within 0.1 s: killing it" in without_pids(capfd.readouterr().err)


# One that says that it fails because of another; its number is in a file before it ends.
SAY_THE_WORD = (
    "import os, socket; sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
    "sock.sendto(b'', chr(0) + os.environ['FARCALL_LAUNCHER'][1:])"
)
VICTIM = f'echo $$ > $0/new; mv $0/new $0/victim; exec {sys.executable} -ISc "{SAY_THE_WORD}; os._exit(9)"'
OUTLIVE_THE_VICTIM = (
    "until [ -e $0/victim ]; do sleep 0.01; done; while kill -0 `cat $0/victim`; do sleep 0.01; done 2>&-"
)


def test_one_that_failed_because_of_another_is_not_to_blame(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(VICTIM, f"{OUTLIVE_THE_VICTIM}; exit 42", FOREVER, directory=tmp_path) == 42
    assert without_pids(capfd.readouterr().err) == (
        "farcall run: w1 (rank 1, pid N) exited with status 42; ending the other worker\n"
    )


def test_if_all_who_fail_do_so_because_of_another_the_first_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    second = VICTIM.replace("$0/victim", "$0/other").replace("_exit(9)", "_exit(8)")
    assert (
        supervise(f"{OUTLIVE_THE_VICTIM}; {second}", VICTIM, f"{OUTLIVE_THE_VICTIM}; exit 0", directory=tmp_path) == 9
    )
    assert without_pids(capfd.readouterr().err) == "farcall run: w1 (rank 1, pid N) exited with status 9\n"


def test_the_one_to_blame_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farcall.launcher.supervisor._CAUSE_WAIT_S", 0.1)
    assert supervise(VICTIM, FOREVER, directory=tmp_path) == 9
    assert without_pids(capfd.readouterr().err) == (
        "farcall run: w0 (rank 0, pid N) exited with status 9; ending the other worker\n"
    )


def test_what_a_child_of_a_worker_says_does_not_count_for_the_worker(capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(f'{sys.executable} -ISc "{SAY_THE_WORD}"; exit 3', FOREVER) == 3


def test_what_a_worker_has_started_ends_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert supervise("sleep 600 & echo $!") == 0
    assert time.monotonic() - started < 20
    assert not is_running(int(capfd.readouterr().out.removeprefix("w0 | ")))


def test_what_a_worker_has_started_is_asked_to_end_even_after_the_worker_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    parent = f"sleep 600 & echo $!; {SAY_READY}; wait"
    assert supervise(parent, f"{WAIT_FOR_READY}; exit 3", directory=tmp_path) == 3
    assert time.monotonic() - started < 20  # much less than the grace
    assert not is_running(int(capfd.readouterr().out.removeprefix("w0 | ")))


def test_what_a_worker_has_started_is_killed_if_it_does_not_want_to_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parent = f"(trap '' TERM; {SAY_READY}; {SLEEP_ON}) & {WAIT_FOR_READY}"
    assert supervise(parent, grace=0.1, directory=tmp_path) == 0
    assert without_pids(capfd.readouterr().err) == (
        "farcall run: a process started by w0 (rank 0, pid N) did not end within 0.1 s: killing it\n"
    )


def test_one_who_left_the_group_and_holds_the_output_does_not_hold_us(capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise("setsid sleep 600 & echo $!") == 0
    os.kill(int(capfd.readouterr().out.removeprefix("w0 | ")), signal.SIGKILL)


def test_if_a_worker_cannot_be_started_those_before_it_are_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def start(plan: WorkerPlan) -> WorkerProcess:
        if plan.rank == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return WorkerProcess(plan)

    monkeypatch.setattr("farcall.launcher.supervisor.WorkerProcess", start)
    assert supervise(FOREVER, FOREVER) == 1
    assert capfd.readouterr().err == (
        "farcall run: cannot start w1 (rank 1): [Errno 11] Resource temporarily unavailable; ending the other worker\n"
    )


def test_no_worker_is_left_behind_if_the_loop_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(plan: WorkerPlan) -> WorkerProcess:
        started.append(WorkerProcess(plan))
        return started[-1]

    monkeypatch.setattr("farcall.launcher.supervisor.WorkerProcess", start)
    monkeypatch.setattr(Supervisor, "_handle_ended_workers", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        supervise("echo; exec sleep 600")
    assert not is_running(started[0].pid)


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
