"""`python -m farcall.pytorch program`: the program is the process's `__main__` module, as it is under `python`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install farcall[torch]")

from program_stage import TIME_LIMIT_S, run, run_ranks, start

pytestmark = pytest.mark.timeout(3 * TIME_LIMIT_S)

SERVES_AT_EXIT = """
import atexit, os, pathlib, sys, time
import torch
import torch.distributed.rpc as rpc

rank = int(os.environ["RANK"])


def scaled(x, factor):
    return x * factor


class Counter:
    count = 0

    def up(self):
        self.count += 1
        return self.count


@rpc.functions.async_execution
def twice(x):
    return rpc.rpc_async("worker0", scaled, args=(x, 2))


def work():
    while not pathlib.Path("ended").exists():
        time.sleep(0.01)
    print(rpc.rpc_sync("worker1", scaled, args=(torch.ones(2), 3)).tolist())
    counter = rpc.remote("worker1", Counter)
    print(counter.rpc_sync().up(), counter.rpc_sync().up())
    print(rpc.rpc_sync("worker1", twice, args=(4,)))


rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
atexit.register(rpc.shutdown)
if rank == 1:
    atexit.register(lambda: pathlib.Path("ended").touch())  # handlers run last first
else:
    work()
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [["program.py"], ["-m", "package.program"]], ids=["script", "module"])
def test_a_program_serves_from_an_exit_handler(tmp_path: Path, command: list[str]) -> None:
    tmp_path.joinpath("package").mkdir()
    for path in ("program.py", "package/program.py"):
        tmp_path.joinpath(path).write_text(SERVES_AT_EXIT)
    assert run_ranks(command, tmp_path, 2) == ["[3.0, 3.0]\n1 2\n8\n", ""]


DESCRIBES_ITSELF = """
'''A program.'''
import os, pickle, sys

def f():
    return 1

main = sys.modules["__main__"]
here = globals() is vars(main)
print(here, sorted(set(globals()) - {"__annotations__"}))
print(__name__, __doc__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__, __builtins__)
print(__cached__, sys.argv, sys.path[0], pickle.loads(pickle.dumps(f)) is f)
os.chdir("/")
print(os.path.exists(__file__))
"""


@pytest.mark.parametrize(
    "command",
    [
        ["program.py", "-m", "x"],
        ["link.py"],
        ["-m", "program", "-x"],
        ["-m", "package", "a"],
        ["-m", "package.program", "-m", "b"],
        ["package", "a"],
    ],
    ids=["script", "link", "module", "package", "module of a package", "directory"],
)
def test_the_program_finds_what_it_finds_under_python(tmp_path: Path, command: list[str]) -> None:
    tmp_path.joinpath("package").mkdir()
    tmp_path.joinpath("package", "__init__.py").touch()
    for path in ("program.py", "package/program.py", "package/__main__.py"):
        tmp_path.joinpath(path).write_text(DESCRIBES_ITSELF)
    tmp_path.joinpath("link.py").symlink_to("package/program.py")
    under_python = run(command, tmp_path, on="torch")
    assert run(command, tmp_path) == under_python
    assert under_python.startswith("True ")


SPAWNS = """
import multiprocessing, sys

def f(x):
    return x + 1

def child(queue):
    queue.put((f(1), f.__module__, sys.modules["__main__"].f is f, __import__("torch.distributed.rpc").__name__))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [["program.py"], ["-m", "program"]], ids=["script", "module"])
def test_spawned_children_find_the_program(tmp_path: Path, command: list[str]) -> None:
    tmp_path.joinpath("program.py").write_text(SPAWNS)
    out = run(command, tmp_path)
    assert out == run(command, tmp_path, on="torch")
    assert out == "(2, '__mp_main__', True, 'torch')\n"


ENDINGS = {
    "0": "pass",
    "7": "import sys; sys.exit(7)",
    "1, with a message": "raise SystemExit('no more')",
    "1, with a traceback": "def f():\n    return 1 / 0\nf()",
    "a signal": "raise KeyboardInterrupt",
    "its exit handlers": "import atexit; atexit.register(print, 'at exit')\nraise ValueError('no')",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_program_ends_as_under_python(tmp_path: Path, ending: str) -> None:
    tmp_path.joinpath("program.py").write_text(ending)
    ends = []
    for on in ("torch", "farcall"):
        process = start(["program.py"], tmp_path, on="torch" if on == "torch" else "farcall")
        out, err = process.communicate(timeout=TIME_LIMIT_S)
        program_lines = err[err.index(f'  File "{tmp_path}') :] if "Traceback" in err else err
        ends.append((process.returncode, out, program_lines))
    assert ends[0] == ends[1]


def test_no_program(tmp_path: Path) -> None:
    for command, why in (
        ([], "usage: python -m farcall.pytorch"),
        (["-m"], "-m needs the name of a module"),
        (["nowhere.py"], "the script 'nowhere.py' does not exist"),
    ):
        process = start(command, tmp_path)
        assert why in process.communicate(timeout=TIME_LIMIT_S)[1]
        assert process.returncode == 2
