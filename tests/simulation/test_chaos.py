"""The chaos test, in short: what it says if all is well, and that it finds what is not. `make chaos` is longer."""

from __future__ import annotations

import re
import signal
import tempfile
from pathlib import Path

import pytest

from simulation import chaos, chaos_verdict
from simulation.chaos_child import Child, Files

SEED = 20
SECONDS = 20.0


@pytest.mark.long
@pytest.mark.timeout(200)
def test_everything_happens_to_a_group_under_load(capsys: pytest.CaptureFixture[str]) -> None:
    status = chaos.main(["--seconds", str(SECONDS), "--workers", "6", "--seed", str(SEED)])
    printed = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{printed}")
    assert status == 0, printed
    for what in ("cuts", "kills", "kills of the store's host", "stops", "long stops", "expelled", "joins", "leaves"):
        assert re.search(rf"{what} \d", printed), what


@pytest.mark.timeout(60)
def test_who_is_lost_without_a_reason_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def kill_without_a_word(self: chaos.Chaos) -> None:
        if not self.counts:
            self.counts["kills"] += 1
            self.children[0].signal(signal.SIGKILL)

    monkeypatch.setattr(chaos.Chaos, "_act", kill_without_a_word)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    assert chaos.main(["--seconds", "3", "--workers", "3", "--seed", "1"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"BROKEN: w1 \(number \d+, pid \d+\) ended with status -9", printed)
    assert str(tmp_path) in printed


# -- the verdict


class Wrote(Child):
    """A worker that has come to its end."""

    def __init__(self, directory: Path, name: str, notes: str, fate: str = "leaves", errors: str = "") -> None:
        self.name = name
        self.fate = fate
        self.files = Files(directory, name)
        self.files.notes.write_text(notes)
        self.files.errors.write_text(errors)

    def __str__(self) -> str:
        return self.name


FINE = """\
call 1.1
ran 1.1
end 1.1 right
call 1.2
end 1.2 WorkerLostError worker 'b' was lost: it closed the connection
lost b 2
"""


def test_only_calls_that_are_meant_to_be_cancelled_or_are_nested_may_be(tmp_path: Path) -> None:
    notes = """\
call 1.1c
end 1.1c CallCancelledError the call was cancelled
call 1.2i
end 1.2i CancelledError the call that this function runs for was cancelled
call 1.3c
end 1.3c RpcTimeoutError it had started there
call 1.4
end 1.4 CallCancelledError the call on worker 'a' was cancelled
call 1.5c
end 1.5c wrong 'the result of a cancelled call'
hung 2.1c
"""
    verdict = chaos_verdict.judge([Wrote(tmp_path, "a", notes)], set())
    assert verdict.calls["cancelled"] == 3
    assert verdict.findings == [
        "call 1.4 of a ended with CallCancelledError: the call on worker 'a' was cancelled",
        "call 1.5c of a got what was not its own: 'the result of a cancelled call'",
        "a went on with call 2.1c, which nobody waited for",
    ]


def test_what_is_in_order(tmp_path: Path) -> None:
    children = [Wrote(tmp_path, "a", FINE), Wrote(tmp_path, "b", "call 2.1\nran 1.2\n", "killed", "Traceback (most")]
    verdict = chaos_verdict.judge(children, {("b", 2)})
    assert verdict.findings == []
    assert verdict.calls == {
        "ended": 2,
        "with their own result": 1,
        "functions run": 2,
        "of workers that were killed": 1,
    }
    assert verdict.errors == {"WorkerLostError": 1}


@pytest.mark.parametrize(
    ("notes", "finding"),
    [
        ("call 1.1\n", "a: calls that never ended: ['1.1']"),
        ("call 1.1\nend 1.1 wrong ('1.2', 0)\n", "call 1.1 of a got what was not its own: ('1.2', 0)"),
        ("call 1.1\nend 1.1 KeyError 3\n", "call 1.1 of a ended with KeyError: 3"),
        (
            "call 1.1\nend 1.1 RpcTimeoutError worker 'a' did not answer\n",
            "call 1.1 of a ended with RpcTimeoutError: worker 'a' did not answer",
        ),
        (
            "call 1.1\nend 1.1 WorkerLostError somebody was lost\n",
            "call 1.1 of a ended with an error that names nobody: WorkerLostError: somebody was lost",
        ),
        (
            "call 1.1\nend 1.1 ExpelledError worker 'a' (this one)\n",
            "call 1.1 of a ended with ExpelledError: worker 'a' (this one)",
        ),
        ("ran 1.1\nran 1.1\n", "call 1.1 ran 2 times"),
        ("lost b 3\n", "a took b (number 3) for dead, who was not"),
    ],
)
def test_what_is_not(tmp_path: Path, notes: str, finding: str) -> None:
    assert chaos_verdict.judge([Wrote(tmp_path, "a", notes)], {("b", 2)}).findings == [finding]


def test_a_traceback_is_told(tmp_path: Path) -> None:
    children = [Wrote(tmp_path, "a", "", errors="Traceback (most recent call last)")]
    assert chaos_verdict.judge(children, set()).findings == ["a wrote a traceback: Traceback (most recent call last)"]
