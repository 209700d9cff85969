from __future__ import annotations

from importlib.metadata import version

import pytest

from farcall.cli.main import main


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"farcall {version('farcall')}\n"


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"]])
def test_help_names_run_and_ends_well(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    assert "run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["run", "script.py"], "required: -n/--workers"),
        (["run", "-n", "two", "script.py"], "invalid int value: 'two'"),
        (["run", "-n", "2", "--nam", "x", "script.py"], "--nam"),
    ],
)
def test_what_cannot_be_parsed_ends_with_status_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_usage_error_is_said_in_one_line_and_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "0", "script.py"]) == 2
    assert capsys.readouterr().err == "farcall: -n must be at least 1, not 0\n"
