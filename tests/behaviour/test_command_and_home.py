"""First steps that go wrong: `farcall run` without a program, and a home directory that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

ALONE = """
import sys
import farcall as rpc
options = rpc.RpcBackendOptions(init_method=f"file://{sys.argv[1]}/meeting", init_timeout=20)
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
print(rpc.rpc_sync("alone", max, args=(1, 2)))
rpc.shutdown()
"""


def farcall(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "farcall", *arguments], capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("arguments", [["-n", "2"], ["-n", "2", "-m"], ["--workers", "2", "--"]])
def test_without_a_program_it_says_what_is_missing_with_an_example(arguments: list[str]) -> None:
    done = farcall("run", *arguments)
    assert done.returncode == 2
    assert "no script or module to run was given. Name a script, or a module after -m" in done.stderr
    assert "`farcall run -n 2 train.py" in done.stderr
    assert "ARGUMENT is required" not in done.stderr
    assert "are required" not in done.stderr


def test_options_may_stand_before_and_behind_the_program(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    done = farcall("run", "-n", "1", "--grace", "1", str(script), "-n", "7", "--", "-m", "x")
    assert done.returncode == 0
    assert "['-n', '7', '--', '-m', 'x']" in done.stdout


NAMED = """
import os, sys
import farcall as rpc
rank = int(os.environ["RANK"])
rpc.init_rpc("parameters" if rank == 0 else None)
print("as", rpc.get_worker_info().name, flush=True)
rpc.shutdown()
sys.exit(3 if rank == 0 else 0)
"""


def test_output_has_the_names_that_the_workers_give_themselves(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NAMED)
    done = farcall("run", "-n", "2", "--name", "w", str(script))
    assert sorted(done.stdout.splitlines()) == ["parameters | as parameters", "w1 | as w1"]
    assert "farcall run: parameters (rank 0, pid " in done.stderr


def start_alone(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("FARCALL_SECRET", "XDG_STATE_HOME")}
    return subprocess.run(
        [sys.executable, "-c", ALONE, str(directory)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=50,
    )


@pytest.mark.parametrize("state", ["", "{home}/.local/state", "{home}/state"])
def test_a_home_directory_that_is_not_there_is_never_made(tmp_path: Path, state: str) -> None:
    home = tmp_path / "nonexistent"
    variables = {"XDG_STATE_HOME": state.format(home=home)} if state else {}
    done = start_alone(tmp_path, HOME=str(home), **variables)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert f"the home directory {home} does not exist" in last
    assert "set FARCALL_SECRET on all workers" in last
    assert not home.exists()


def test_a_home_directory_that_is_there_gets_the_secret(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    done = start_alone(tmp_path, HOME=str(home))
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    secret = home / ".local" / "state" / "farcall" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600


def test_with_the_variable_no_home_directory_is_needed(tmp_path: Path) -> None:
    done = start_alone(tmp_path, HOME=str(tmp_path / "nonexistent"), FARCALL_SECRET="sixteen characters and more")
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert not (tmp_path / "nonexistent").exists()
