"""`clients`: the runner and the table, with fake programs. No client and no torch is needed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.catalog import CLIENTS, Client, Program
from clients.command import Row, main, table
from clients.runner import Implementation, Result, run
from eventually import eventually


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Program]:
    """Makes a program of this code."""

    def make(code: str, ranks: int = 0, name: str = "a program", time_limit_s: float = 50.0) -> Program:
        path = tmp_path / f"{name}.py"
        path.write_text(code)
        return Program(name, (str(path), "an argument"), ranks, time_limit_s)

    return make


def test_a_program_passes_with_status_0(program: Callable[..., Program]) -> None:
    result = run(program("import sys; assert sys.argv[1:] == ['an argument']; print('done')"), "torch")
    assert (result.passed, result.reason, result.output) == (True, "", "done")
    assert result.seconds > 0


def test_a_program_fails_with_another_status(program: Callable[..., Program]) -> None:
    result = run(program("raise ValueError('no')"), "torch")
    assert (result.passed, result.reason) == (False, "exit status 1")
    assert result.output.endswith("ValueError: no")
    result = run(program("import os; os.kill(os.getpid(), 9)"), "torch")
    assert (result.passed, result.reason) == (False, "ended by SIGKILL")


def test_every_rank_has_its_environment(program: Callable[..., Program]) -> None:
    code = """
import os, sys
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME".split()
sys.stdout.write(" ".join(os.environ[name] for name in names) + "\\n")
"""
    result = run(program(code, ranks=3), "torch")
    assert sorted(result.output.splitlines()) == [f"{rank} {rank} 3 127.0.0.1 lo lo" for rank in range(3)]


def test_one_rank_that_fails_ends_the_others(program: Callable[..., Program]) -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(5)\ntime.sleep(1000)"
    result = run(program(code, ranks=3), "torch")
    assert (result.passed, result.reason) == (False, "rank 1: exit status 5")


def test_a_program_that_does_not_end_is_killed_with_its_children(
    program: Callable[..., Program], tmp_path: Path
) -> None:
    code = f"""
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
path = pathlib.Path({str(tmp_path)!r}, "child")
path.with_suffix(".new").write_text(str(child.pid))
path.with_suffix(".new").rename(path)
time.sleep(1000)
"""
    result = run(program(code), "torch", 3.0)
    assert (result.passed, result.reason) == (False, "did not end within 3 s")
    child = int(tmp_path.joinpath("child").read_text())
    eventually(lambda: not is_running(child))


def test_what_a_program_leaves_behind_is_killed(program: Callable[..., Program]) -> None:
    code = (
        "import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']).pid)"
    )
    result = run(program(code), "torch")
    assert result.passed
    eventually(lambda: not is_running(int(result.output)))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


PASSED = Result(True, 1.0)
FAILED = Result(False, 2.0, "exit status 1", "its last words")


@pytest.mark.parametrize(
    ("on_torch", "on_farcall", "status"),
    [(PASSED, PASSED, 0), (PASSED, FAILED, 1), (FAILED, FAILED, 0), (FAILED, PASSED, 0)],
)
def test_the_verdict(
    on_torch: Result, on_farcall: Result, status: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results: dict[Implementation, Result] = {"torch": on_torch, "farcall": on_farcall}
    client = Client("client", "client", "json", (Program("program", ("program.py",)),))
    assert main(["--json", str(tmp_path / "j")], [client], lambda program, on, limit: results[on]) == status
    out = capsys.readouterr().out
    assert table([Row("client", "program", on_torch, on_farcall)]) in out
    assert ("its last words" in out) == (status == 1)
    [row] = json.loads(tmp_path.joinpath("j").read_text())
    assert (row["client"], row["on_torch"]["passed"], row["on_farcall"]["passed"]) == (
        "client",
        on_torch.passed,
        on_farcall.passed,
    )


def test_the_table() -> None:
    assert table([Row("a", "b c", PASSED, FAILED)]).splitlines() == [
        "| client | program | torch | s | farcall | s |",
        "|---|---|---|---:|---|---:|",
        "| a | b c | passed | 1.0 | failed: exit status 1 | 2.0 |",
    ]


def test_a_client_that_is_not_there_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    there = Client("there", "there", "json", (Program("one", ()), Program("two", ())))
    missing = Client("missing", "missing", "no_such_module", (Program("three", ()),))
    ran = []

    def run_program(program: Program, on: Implementation, limit: float | None) -> Result:
        ran.append((program.name, on))
        return PASSED

    assert main(["-k", "one", "-k", "three"], [there, missing], run_program) == 0
    assert ran == [("one", "torch"), ("one", "farcall")]
    assert "missing is left out: ModuleNotFoundError: No module named 'no_such_module'" in capsys.readouterr().err
    assert main(["missing"], [there, missing], run_program) == 2
    assert main(["unknown"], [there, missing], run_program) == 2


def test_more_runs_are_runs_on_farcall() -> None:
    client = Client("client", "client", "json", (Program("program", ()),))
    ran = []

    def run_program(program: Program, on: Implementation, limit: float | None) -> Result:
        ran.append((on, limit))
        return Result(len(ran) < 4, 1.0)

    assert main(["--runs", "5", "--timeout", "7"], [client], run_program) == 1
    assert ran == [("torch", 7.0), ("farcall", 7.0), ("farcall", 7.0), ("farcall", 7.0)]


def test_the_catalog_names_programs_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for client in CLIENTS:
        for program in client.programs:
            assert os.path.isfile(program.command[0]), program
    assert main(["--requirements"]) == 0
    assert capsys.readouterr().out.splitlines() == [client.requirement for client in CLIENTS]
