from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farcall.bench import command
from farcall.bench.effort import PARTS, QUICK, Effort
from farcall.cli.main import main


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the benchmark is asked for, which is not run."""
    asked: list[Any] = []

    def run(*arguments: Any) -> int:
        asked.extend(arguments)
        return 7

    monkeypatch.setattr(command, "run", run)
    return asked


def test_without_options_it_is_a_full_run_of_farcall_alone(asked: list[Any]) -> None:
    assert main(["bench"]) == 7
    assert asked == [Effort(), [], command.Outputs()]


def test_every_option_reaches_the_benchmark(asked: list[Any]) -> None:
    words = "--quick --rounds 2 --measure startup,in-flight --sizes 0,1KiB --in-flight 4 --start 3,1"
    main(["bench", *words.split(), "--json", "a.json", "--plots", "b"])
    effort, peers, outputs = asked
    assert (effort.rounds, effort.parts, effort.sizes) == (2, ("in-flight", "startup"), (0, 1024))
    assert (effort.windows, effort.workers, effort.seconds) == ((4,), (1, 3), QUICK.seconds)
    assert peers == []
    assert outputs == command.Outputs(Path("a.json"), Path("b"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rounds 0", "farcall: --rounds must be at least 1, not 0\n"),
        ("--sizes 4KB", "farcall: --sizes: '4KB' is not a size; write sizes like 0,64,4KiB,1MiB\n"),
        ("--in-flight 0", "farcall: --in-flight: '0' is not a whole number of at least 1; write numbers like 1,2,8\n"),
        ("--start x", "farcall: --start: 'x' is not a whole number of at least 1; write numbers like 1,2,8\n"),
        ("--measure luck", "farcall: --measure: 'luck' does not exist; choose from payload, "),
    ],
)
def test_bad_input_is_refused_in_one_line(
    asked: list[Any], words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(said)
    assert asked == []


def test_the_help_names_all_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert [name for name in PARTS if name not in shown] == []
