"""`farcall.engines.local`: processes for the length of a block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import farcall
from farcall import UsageError, WorkerLostError, engines


def my_name() -> str:
    return farcall.get_worker_info().name


def ask(other: str) -> list[str]:
    return [my_name(), farcall.worker(other).call(my_name)]


def test_processes_live_as_long_as_the_block() -> None:
    with engines.local(2) as group:
        assert group.info.name == my_name() == "main"
        assert [info.name for info in farcall.get_worker_infos()] == ["main", "worker0", "worker1"]
        assert group.worker("worker0").call(ask, "worker1") == ["worker0", "worker1"]
        pids = [group.worker(rank).call(os.getpid) for rank in (1, 2)]
        assert os.getpid() not in pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_worker_that_dies_fails_its_calls_and_nothing_else() -> None:
    with engines.local(2, name="w") as group:
        with pytest.raises(WorkerLostError):
            group.worker("w0").call(os.kill, group.worker("w0").call(os.getpid), signal.SIGKILL)
        assert group.worker("w1").call(my_name) == "w1"


def test_leaving_by_an_exception_ends_the_processes() -> None:
    pids: list[int] = []

    def fail() -> None:
        with engines.local(1) as group:
            pids.append(group.worker("worker0").call(os.getpid))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_script_that_cannot_be_imported_by_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import farcall\nwith farcall.engines.local(1) as group:\n    pass\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1
    assert 'put what starts it below `if __name__ == "__main__":`' in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "the number of workers must be at least 1, not 0"),
        ({"workers": True}, "the number of workers must be at least 1, not True"),
        ({"workers": 1, "options": {"spin": 0}}, "the options must be RpcBackendOptions, not {'spin': 0}"),
        ({"workers": 1, "name": ""}, "the name of the workers must be a str"),
        ({"workers": 1, "options": farcall.RpcBackendOptions(init_method="tcp://a:1")}, "leave init_method out"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engines.local(**arguments)  # type: ignore[arg-type]
