"""Workers that meet by `file://`: paths that are no good, two groups with one file, and workers that come too late."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import farcall as rpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

WORKER = """
import logging, sys
import farcall as rpc
logging.basicConfig(level=logging.DEBUG)
name, rank, size, url = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
print("starting", flush=True)
options = rpc.RpcBackendOptions(init_method=url, init_timeout=float(sys.argv[5]))
rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
print("joined", *sorted(info.name for info in rpc.get_worker_infos()), flush=True)
rpc.shutdown(graceful=sys.stdin.readline() != "leave\\n")
"""

StartWorker = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """Starts a worker in a process of its own; it shuts down at the first line it gets."""
    processes: list[subprocess.Popen[str]] = []

    def start(name: str, rank: int, size: int, url: str, init_timeout: float = 50) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WORKER), name, str(rank), str(size), url, str(init_timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def line_of(stream: object) -> str:
    return stream.readline().strip()  # type: ignore[attr-defined, no-any-return]


def finish(*processes: subprocess.Popen[str]) -> None:
    """Has the workers shut down, all at once, and checks that nothing went wrong."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        assert process.wait(30) == 0


def join_error(name: str, rank: int, size: int, url: str, init_timeout: float) -> rpc.RpcError:
    """How this process fails to join."""
    options = rpc.RpcBackendOptions(init_method=url, init_timeout=init_timeout)
    with pytest.raises(rpc.RendezvousError) as caught:
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    return caught.value


# Paths


def test_a_worker_that_waits_for_rank_0_says_that_the_directory_is_missing(tmp_path: Path) -> None:
    error = join_error("w1", 1, 2, f"file://{tmp_path}/missing/meeting", 0.3)
    assert isinstance(error, rpc.RendezvousTimeoutError), "somebody may still create it"
    assert f"in 0.3 s: the directory {tmp_path}/missing does not exist on this host; create it" in str(error)
    assert "has not come" not in str(error)


def test_a_worker_that_waits_for_rank_0_says_that_nothing_can_be_written_there() -> None:
    error = join_error("w1", 1, 2, "file:///proc/farcall-meeting", 0.3)
    assert "in 0.3 s: no file can be written in the directory /proc on this host (" in str(error)
    assert "has not come" not in str(error)


def test_a_worker_that_waits_for_rank_0_says_that_the_file_holds_something_else(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    error = join_error("w1", 1, 2, f"file://{path}", 0.3)
    assert f"the file {path} was not written by farcall" in str(error)
    assert path.read_text() == "dear diary"


@pytest.mark.parametrize("rank", [0, 1])
def test_every_worker_refuses_at_once_a_path_that_can_never_be_a_file(tmp_path: Path, rank: int) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for path, reason in [
        (tmp_path, "is a directory"),
        (tmp_path / "pipe", "is not a regular file"),
        (tmp_path / "file" / "below", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ]:
        error = join_error("w", rank, 2, f"file://{path}", 50)
        assert not isinstance(error, rpc.RendezvousTimeoutError)
        assert reason in str(error)
        assert "use another path" in str(error)


# Two groups with one file


def test_a_group_of_another_size_does_not_take_the_file_of_a_group_that_lives(
    tmp_path: Path, start_worker: StartWorker
) -> None:
    path = tmp_path / "meeting"
    url = f"file://{path}"
    first = start_worker("first", 0, 2, url)
    assert line_of(first.stdout) == "starting"
    while not path.exists() or not path.read_bytes():
        assert first.poll() is None
    written = path.read_bytes()
    refused = join_error("intruder", 0, 3, url, 10)
    assert not isinstance(refused, rpc.RendezvousTimeoutError)
    assert f"another process already hosts a store for the file {path}" in str(refused)
    assert "use another file" in str(refused)
    other = join_error("intruder1", 1, 3, url, 10)
    assert "2 workers" in str(other)
    assert "start all workers with the same world_size" in str(other)
    assert path.read_bytes() == written
    second = start_worker("second", 1, 2, url)
    assert line_of(second.stdout) == "starting"
    assert line_of(first.stdout) == "joined first second", "the first group is not harmed"
    assert line_of(second.stdout) == "joined first second"
    finish(first, second)


def test_the_file_of_a_group_that_was_killed_is_replaced_by_a_group_of_another_size(
    tmp_path: Path, start_worker: StartWorker
) -> None:
    path = tmp_path / "meeting"
    url = f"file://{path}"
    first = start_worker("first", 0, 2, url)
    while not path.exists() or not path.read_bytes():
        assert first.poll() is None
    first.kill()
    first.wait()
    written = path.read_bytes()
    alone = start_worker("alone", 0, 1, url)
    assert line_of(alone.stdout) == "starting"
    assert line_of(alone.stdout) == "joined alone"
    assert path.read_bytes() != written
    finish(alone)


# Too late


def test_who_comes_for_a_rank_that_is_taken_hears_that_first_though_the_group_ends_meanwhile(
    tmp_path: Path, start_worker: StartWorker
) -> None:
    url = f"file://{tmp_path}/meeting"
    group = [start_worker(f"w{rank}", rank, 2, url) for rank in range(2)]
    for process in group:
        assert line_of(process.stdout) == "starting"
        assert line_of(process.stdout) == "joined w0 w1"
    late = start_worker("late", 1, 2, url, 6)
    for _ in range(2):  # when it comes again it has read the first answer
        while "rank 1 is taken" not in line_of(group[0].stderr):
            assert group[0].poll() is None
    for process in group:
        process.kill()
        process.wait()
    _, said = late.communicate(timeout=55)
    kind, message = said[said.rindex("farcall.errors.Rendezvous") :].split(": ", 1)
    assert message.startswith("worker 'late' (rank 1) cannot join at the file ")
    assert "rank 1 is taken by worker 'w1' (rank 1); start 'late' with" in message
    assert "has not come" not in message
    if kind.endswith("RendezvousTimeoutError"):  # else it was refused for so long that it believed it
        assert "That store is gone, so its group has ended" in message


def test_who_comes_back_to_a_group_that_it_has_left_hears_that(tmp_path: Path, start_worker: StartWorker) -> None:
    url = f"file://{tmp_path}/meeting"
    group = [start_worker(f"w{rank}", rank, 2, url) for rank in range(2)]
    for process in group:
        assert line_of(process.stdout) == "starting"
        assert line_of(process.stdout) == "joined w0 w1"
    group[1].communicate("leave\n", timeout=30)
    again = join_error("w1", 1, 2, url, 5)
    assert "A store does that if rank 1 was in its group and has left it" in str(again)
    assert "End the other workers of that run and start all workers again" in str(again)
    assert "has not come" not in str(again)
