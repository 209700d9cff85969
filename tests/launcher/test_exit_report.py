from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType

import pytest

from farcall.errors import RendezvousError, RendezvousTimeoutError, ShutdownError, WorkerLostError
from farcall.launcher.exit_report import LAUNCHER_VARIABLE, ExitReports, install_exit_report, report_name


@pytest.fixture
def reports() -> Iterator[ExitReports]:
    reports = ExitReports()
    yield reports
    reports.close()


class Before:
    """The hook that was there before."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.errors.append(error)


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Before:
    before = Before()
    monkeypatch.setattr(sys, "excepthook", before)
    return before


def end_by(error: BaseException) -> None:
    """What the interpreter does with an exception that nobody has caught."""
    try:
        raise error
    except BaseException as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)


def line_of_raise() -> int:
    return end_by.__code__.co_firstlineno + 3


@pytest.mark.parametrize(
    "error", [WorkerLostError("bob was lost"), ShutdownError("bob has left"), RendezvousError("bob is gone")]
)
def test_an_end_by_another_is_told_and_takes_one_line(
    error: Exception, reports: ExitReports, before: Before, capsys: pytest.CaptureFixture[str]
) -> None:
    install_exit_report({LAUNCHER_VARIABLE: reports.name})
    end_by(error)
    assert reports.read() == {os.getpid()}
    assert reports.read() == set(), "told once"
    assert before.errors == []
    assert capsys.readouterr().err == f"{__file__}:{line_of_raise()}: {type(error).__name__}: {error}\n"


@pytest.mark.parametrize(
    "error", [ValueError("mine"), RendezvousTimeoutError("1 of 2 came"), KeyboardInterrupt()], ids=repr
)
def test_any_other_end_is_left_to_the_hook_that_was_there(
    error: BaseException, reports: ExitReports, before: Before
) -> None:
    install_exit_report({LAUNCHER_VARIABLE: reports.name})
    end_by(error)
    assert before.errors == [error]
    assert reports.read() == set()


def test_preparing_twice_is_the_same_as_once(reports: ExitReports, before: Before) -> None:
    install_exit_report({LAUNCHER_VARIABLE: reports.name})
    hook = sys.excepthook
    install_exit_report({LAUNCHER_VARIABLE: reports.name})
    assert sys.excepthook is hook


def test_without_a_launcher_nothing_is_changed(before: Before) -> None:
    install_exit_report({})
    assert sys.excepthook is before


def test_a_launcher_that_is_gone_is_no_matter(before: Before, capsys: pytest.CaptureFixture[str]) -> None:
    gone = ExitReports()
    name = gone.name
    gone.close()
    install_exit_report({LAUNCHER_VARIABLE: name})
    end_by(WorkerLostError("bob was lost"))
    assert capsys.readouterr().err.endswith("WorkerLostError: bob was lost\n")


def test_two_launchers_have_two_names(reports: ExitReports) -> None:
    other = ExitReports()
    assert other.name != reports.name
    other.close()


SCRIPT = """
import sys, farcall as rpc
url = f"file://{sys.argv[1]}/meeting"
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=url))
raise rpc.WorkerLostError("bob was lost")
"""


def test_init_rpc_prepares_it_and_the_status_stays(reports: ExitReports, tmp_path: os.PathLike[str]) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, LAUNCHER_VARIABLE: reports.name},
        stderr=subprocess.PIPE,
        text=True,
    )
    _, errors = worker.communicate(timeout=20)
    assert reports.read() == {worker.pid}
    assert worker.returncode == 1
    assert errors == "<string>:5: WorkerLostError: bob was lost\n"


def test_a_name_is_told_and_is_no_failure(reports: ExitReports) -> None:
    report_name({LAUNCHER_VARIABLE: reports.name}, "trainer")
    assert reports.read() == set()
    assert reports.take_names() == {os.getpid(): "trainer"}
    assert reports.take_names() == {}


def test_a_name_that_would_spoil_the_output_is_not_used(reports: ExitReports) -> None:
    report_name({LAUNCHER_VARIABLE: reports.name}, "line\nbreak")
    reports.read()
    assert reports.take_names() == {}


def test_an_empty_name_is_not_taken_for_a_failure(reports: ExitReports) -> None:
    report_name({LAUNCHER_VARIABLE: reports.name}, "")
    assert reports.read() == set()
    assert reports.take_names() == {}


def test_without_a_launcher_no_name_is_told() -> None:
    report_name({}, "trainer")
