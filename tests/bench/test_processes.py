"""Real processes, and none of them is left."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farcall.bench import processes
from farcall.bench.processes import (
    MARK_VARIABLE,
    Endpoint,
    EndpointFailed,
    Endpoints,
    exit_on_signals,
    find_marked,
    kill_marked,
    start_ends,
)
from systems import find

RAW = find("raw-block-unix")
SLEEPER = "import sys, time; print('up', flush=True); time.sleep(60)"


@contextmanager
def sleeper(mark: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that bears this mark, in a session of its own."""
    command = [sys.executable, "-c", SLEEPER, *arguments]
    environment = {**os.environ, MARK_VARIABLE: mark}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def both_ends() -> Iterator[tuple[Endpoint, ...]]:
    """A server and a caller."""
    with Endpoints() as endpoints:
        yield start_ends(endpoints, RAW)


def test_both_ends_come_up_answer_and_end() -> None:
    with both_ends() as (server, caller):
        assert caller.ask("noops", calls=5, warmup=1)["p50_us"] > 0
        pids = [server.pid, caller.pid]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_failure_is_told_with_the_error_in_one_line() -> None:
    with pytest.raises(EndpointFailed) as failed, both_ends() as (_, caller):
        caller.ask("pipelined", calls=1, warmup=1)
    assert failed.value.reason == "NotImplementedError: the ping-pong has one call under way at a time"
    assert "Traceback" in str(failed.value)
    assert "the caller of raw socket, blocking, unix" in str(failed.value)


def test_one_that_says_nothing_is_given_up() -> None:
    with pytest.raises(EndpointFailed) as failed, both_ends() as (server, _):
        server.receive(0.01)
    assert failed.value.reason == "the server of raw socket, blocking, unix did not answer within 0.01 s"


def test_what_bears_the_mark_is_swept_away_and_nothing_else() -> None:
    with sleeper("one") as one, sleeper("two") as two:
        assert find_marked("one") == [one.pid]
        kill_marked("one")
        assert one.wait(5) == -signal.SIGKILL
        assert two.poll() is None


def test_what_was_started_by_one_with_the_mark_goes_with_it() -> None:
    # As one that has written over its environment.
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}], env={{}})"
    environment = {**os.environ, MARK_VARIABLE: "one"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        assert len(find_marked("one")) == 2
        kill_marked("one")
        assert parent.stdout.read() == b""  # nobody holds the other end any more
        assert find_marked("one") == []


def test_who_clears_away_after_others_is_killed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_KILL_LIMIT_S", 0.2)
    with sleeper("one") as other, sleeper("one", "multiprocessing.resource_tracker") as tracker:
        kill_marked("one")
        assert other.wait(5) == -signal.SIGKILL
        assert tracker.poll() is None
        monkeypatch.setattr(processes, "_TRACKER_LIMIT_S", -1.0)
        kill_marked("one")
        assert tracker.wait(5) == -signal.SIGKILL


def test_what_an_end_has_started_is_gone_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda size: "of this test")
    with sleeper("of this test") as grandchild, Endpoints():
        pass
    assert grandchild.returncode == -signal.SIGKILL


def test_endpoints_of_an_endpoint_do_not_sweep_their_own_process_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK_VARIABLE, "of the bench")
    with sleeper("of the bench") as sibling:
        with Endpoints():
            pass
        assert sibling.poll() is None


def test_sigterm_and_ctrl_c_are_an_orderly_end() -> None:
    with pytest.raises(SystemExit) as ended, exit_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    with pytest.raises(SystemExit) as ended, exit_on_signals():
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
