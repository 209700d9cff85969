from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType

import pytest

from farcall.errors import RendezvousError, RendezvousTimeoutError, ShutdownError, WorkerLost
from farcall.last_words import LAUNCHER, Ear, prepare_last_words


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.close()


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
    "error", [WorkerLost("bob was lost"), ShutdownError("bob has left"), RendezvousError("bob is gone")]
)
def test_an_end_by_another_is_told_and_takes_one_line(
    error: Exception, ear: Ear, before: Before, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_last_words({LAUNCHER: ear.name})
    end_by(error)
    assert ear.listen() == {os.getpid()}
    assert ear.listen() == set(), "told once"
    assert before.errors == []
    assert capsys.readouterr().err == f"{__file__}:{line_of_raise()}: {type(error).__name__}: {error}\n"


@pytest.mark.parametrize(
    "error", [ValueError("mine"), RendezvousTimeoutError("1 of 2 came"), KeyboardInterrupt()], ids=repr
)
def test_any_other_end_is_left_to_the_hook_that_was_there(error: BaseException, ear: Ear, before: Before) -> None:
    prepare_last_words({LAUNCHER: ear.name})
    end_by(error)
    assert before.errors == [error]
    assert ear.listen() == set()


def test_preparing_twice_is_the_same_as_once(ear: Ear, before: Before) -> None:
    prepare_last_words({LAUNCHER: ear.name})
    hook = sys.excepthook
    prepare_last_words({LAUNCHER: ear.name})
    assert sys.excepthook is hook


def test_without_a_launcher_nothing_is_changed(before: Before) -> None:
    prepare_last_words({})
    assert sys.excepthook is before


def test_a_launcher_that_is_gone_is_no_matter(before: Before, capsys: pytest.CaptureFixture[str]) -> None:
    gone = Ear()
    name = gone.name
    gone.close()
    prepare_last_words({LAUNCHER: name})
    end_by(WorkerLost("bob was lost"))
    assert capsys.readouterr().err.endswith("WorkerLost: bob was lost\n")


def test_two_launchers_have_two_names(ear: Ear) -> None:
    other = Ear()
    assert other.name != ear.name
    other.close()


SCRIPT = """
import sys, farcall as rpc
url = f"file://{sys.argv[1]}/meeting"
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=url))
raise rpc.WorkerLost("bob was lost")
"""


def test_init_rpc_prepares_it_and_the_status_stays(ear: Ear, tmp_path: os.PathLike[str]) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, LAUNCHER: ear.name},
        stderr=subprocess.PIPE,
        text=True,
    )
    _, errors = worker.communicate(timeout=20)
    assert ear.listen() == {worker.pid}
    assert worker.returncode == 1
    assert errors == "<string>:5: WorkerLost: bob was lost\n"
