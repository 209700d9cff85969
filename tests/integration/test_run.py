"""`farcall run` as a user runs it: real processes, real signals, a real terminal. Few of the workers make calls."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FARCALL = [sys.executable, "-m", "farcall"]
LIMIT = 40.0
"""Seconds after which a test gives up."""

# Waits for the signals that its arguments name; says each, and once more should one come a second time.
LISTENER = """
import signal, sys
numbers = {signal.Signals[name] for name in sys.argv[1:]}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print("ready")
for _ in numbers:
    print("got", signal.Signals(signal.sigwait(numbers)).name)
again = signal.sigtimedwait(numbers, 0.3)
if again:
    print("a second", signal.Signals(again.si_signo).name)
"""

# Hears no signal that can be blocked.
DEAF = """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGALRM})
print("ready")
time.sleep(600)
"""


class Running:
    """A launcher that runs, its output collected as it comes."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self.fd = fd
        self.output = ""

    def read_until(self, pattern: str, times: int = 1) -> None:
        """Reads until so many lines match."""
        deadline = time.monotonic() + LIMIT
        while len(re.findall(pattern, self.output, re.MULTILINE)) < times:
            assert select.select([self.fd], [], [], deadline - time.monotonic())[0], f"only got {self.output!r}"
            try:
                data = os.read(self.fd, 1 << 16)
            except OSError:  # how a terminal ends
                data = b""
            assert data, f"ended with {self.output!r}"
            self.output += data.decode()

    def end(self) -> int:
        """Waits for the launcher; the rest of the output is there afterwards."""
        status = self.process.wait(LIMIT)
        while select.select([self.fd], [], [], 0)[0]:
            try:
                data = os.read(self.fd, 1 << 16)
            except OSError:
                break
            if not data:
                break
            self.output += data.decode()
        return status


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `farcall run` with a script and arguments; both its streams come together."""
    running: list[subprocess.Popen[bytes]] = []

    def start(script: str, *arguments: str, n: int = 2, options: tuple[str, ...] = ()) -> Running:
        (tmp_path / "script.py").write_text(script)
        command = [*FARCALL, "run", "-n", str(n), *options, "script.py", *arguments]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        running.append(process)
        assert process.stdout is not None
        return Running(process, process.stdout.fileno())

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `farcall run` to its end, its streams apart."""
    return subprocess.run(
        [*FARCALL, "run", *arguments],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        timeout=LIMIT,
    )


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- what a worker is


@pytest.mark.parametrize("target", [["package/program.py"], ["-m", "package.program"]])
def test_a_worker_is_the_program_that_python_alone_would_run(tmp_path: Path, target: list[str]) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text(
        "import json, sys\n"
        "print(json.dumps([__name__, __file__, __package__, sys.argv, sys.path, sys.flags.isolated, sys.executable]))\n"
    )
    arguments = [*target, "-n", "3", "--", "a b"]
    alone = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, check=True)
    result = run(tmp_path, "-n", "2", *arguments)
    assert (result.returncode, result.stderr) == (0, b"")
    assert sorted(result.stdout.splitlines()) == [b"worker0 | " + alone.stdout[:-1], b"worker1 | " + alone.stdout[:-1]]


def test_the_workers_know_who_they_are_and_share_a_secret_and_a_port(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import json, os; print(json.dumps(dict(os.environ)))")
    result = run(tmp_path, "-n", "3", "--name", "w", "script.py", FARCALL_SECRET="")
    told = [json.loads(line.partition(b" | ")[2]) for line in sorted(result.stdout.splitlines())]
    assert [(each["FARCALL_WORKER_NAME"], each["RANK"], each["WORLD_SIZE"]) for each in told] == [
        ("w0", "0", "3"),
        ("w1", "1", "3"),
        ("w2", "2", "3"),
    ]
    assert len({(each["FARCALL_SECRET"], each["MASTER_ADDR"], each["MASTER_PORT"]) for each in told}) == 1
    assert len(told[0]["FARCALL_SECRET"]) == 64


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_works_in_a_worker(tmp_path: Path, method: str) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing, sys\n"
        "def double(number): return 2 * number\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:\n"
        "        print(pool.map(double, range(5)))\n"
        "        pool.close(); pool.join()\n"
    )
    result = run(tmp_path, "-n", "1", "script.py", method)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"worker0 | [0, 2, 4, 6, 8]\n", b"")


# -- output


@pytest.mark.parametrize("together", [False, True])
def test_lines_of_many_workers_are_whole_complete_and_in_order(tmp_path: Path, together: bool) -> None:
    (tmp_path / "script.py").write_text(
        "import os, random, sys\n"
        "def lines(stream): return b''.join(b'%s %d %s\\n' % (stream, i, b'x' * (i * 37 % 5000)) for i in range(300))\n"
        "pending = {1: lines(b'out'), 2: lines(b'err')}\n"
        "chance = random.Random(int(os.environ['RANK']))\n"
        "while any(pending.values()):\n"
        "    fd = chance.choice([fd for fd in pending if pending[fd]])\n"
        "    written = os.write(fd, pending[fd][:chance.randrange(1, 9000)])\n"
        "    pending[fd] = pending[fd][written:]\n"
    )
    result = subprocess.run(
        [*FARCALL, "run", "-n", "3", "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        timeout=LIMIT,
    )
    assert result.returncode == 0
    for stream, text in (("out", result.stdout), ("err", result.stdout if together else result.stderr)):
        for rank in range(3):
            prefix = f"worker{rank} | {stream} "
            mine = [line for line in text.decode().splitlines() if line.startswith(prefix)]
            assert mine == [f"{prefix}{i} {'x' * (i * 37 % 5000)}" for i in range(300)]
    assert (result.stdout + (result.stderr or b"")).count(b"\n") == 3 * 2 * 300


def test_odd_bytes_and_an_unfinished_line_arrive(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(r"import os; os.write(1, b'\xff\n\nhalf'); os.write(2, b'\0')")
    result = run(tmp_path, "-n", "1", "script.py")
    assert result.stdout == b"worker0 | \xff\nworker0 | \nworker0 | half\n"
    assert result.stderr == b"worker0 | \0\n"


def test_output_comes_as_it_is_printed(start: Start) -> None:
    running = start("import time; print('early'); time.sleep(600)", n=1)
    running.read_until("^worker0 . early$")


def test_output_may_go_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('x' * 100_000)")
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([*FARCALL, "run", "-n", "2", "script.py"], cwd=tmp_path, stdout=log, check=True, timeout=LIMIT)
    assert sorted((tmp_path / "log").read_text().splitlines()) == [f"worker{i} | {'x' * 100_000}" for i in range(2)]


def test_colour_can_be_had_without_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('hello')")
    result = run(tmp_path, "-n", "1", "script.py", FORCE_COLOR="1", NO_COLOR="")
    assert result.stdout == b"\x1b[36mworker0 | \x1b[0mhello\n"


def test_when_nobody_reads_any_more_the_run_ends(start: Start) -> None:
    running = start("import time\nfor i in range(100_000): print(i); time.sleep(0.01)")
    running.read_until("^worker1 . 3$")
    assert running.process.stdout is not None
    running.process.stdout.close()
    assert running.process.wait(LIMIT) == 128 + signal.SIGPIPE


# -- failure


def test_one_that_fails_ends_the_others_and_is_named(start: Start) -> None:
    running = start(
        "import os, signal, time\n"
        "print('pid', os.getpid())\n"
        "if os.environ['RANK'] == '2': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)\n",
        n=3,
    )
    assert running.end() == 128 + signal.SIGKILL
    pid = re.search(r"worker2 . pid (\d+)", running.output)
    assert pid
    assert f"farcall run: worker2 (rank 2, pid {pid[1]}) was killed by SIGKILL; ending the 2 other workers\n" in (
        running.output
    )


def test_the_status_is_that_of_the_one_that_failed_and_its_traceback_is_seen(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nif os.environ['RANK'] == '1': os._exit(9)\nraise OSError('no')")
    assert run(tmp_path, "-n", "1", "script.py").returncode == 1
    assert b"worker0 | OSError: no\n" in run(tmp_path, "-n", "1", "script.py").stderr


def test_the_one_that_failed_is_named_and_not_those_who_then_wait_in_vain(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, farcall as rpc\n"
        "rpc.init_rpc('worker' + os.environ['RANK'])\n"
        "if os.environ['RANK'] == '0':\n    raise SystemExit(42)\n"
        "rpc.shutdown()\n"
    )
    done = run(tmp_path, "-n", "3", "script.py")
    lines = done.stderr.decode().splitlines()  # in any order: the others hear of the end when the launcher does
    verdicts = [line for line in lines if line.startswith("farcall run: ")]
    victims = [line for line in lines if line not in verdicts]
    assert done.returncode == 42
    assert len(verdicts) == 1
    assert re.match(r"farcall run: worker0 \(rank 0, pid \d+\) exited with status 42", verdicts[0])
    assert all(re.match(r"worker[12] \| .*script.py:(2|5): (Shutdown|Rendezvous)Error: ", line) for line in victims)


def test_a_killed_launcher_leaves_no_worker_and_nothing_that_a_worker_has_started(start: Start) -> None:
    running = start(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print('pids', os.getpid(), child.pid)\n"
        "time.sleep(600)\n"
    )
    running.read_until(r"^worker\d . pids \d+ \d+$", times=2)
    pids = [int(pid) for line in re.findall(r"pids (\d+ \d+)", running.output) for pid in line.split()]
    assert len(pids) == 4
    assert all(map(is_running, pids))
    running.process.kill()
    wait_until(lambda: not any(map(is_running, pids)))


# -- signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_a_signal_reaches_each_worker_once(start: Start, name: str) -> None:
    running = start(LISTENER, name)
    running.read_until("ready$", times=2)
    running.process.send_signal(signal.Signals[name])
    assert running.end() == 0
    for worker in ("worker0", "worker1"):
        assert running.output.count(f"{worker} | got {name}\n") == 1
    assert "a second" not in running.output


def test_a_signal_that_ends_the_workers_gives_the_status_of_that_signal(start: Start) -> None:
    running = start("import time; print('ready'); time.sleep(600)")
    running.read_until("ready$", times=2)
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 128 + signal.SIGTERM


def test_after_an_interrupt_a_worker_may_take_its_time_though_another_has_ended(start: Start) -> None:
    running = start(
        "import os, time\n"
        "try:\n"
        "    print('ready')\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    if os.environ['RANK'] == '0': os._exit(5)\n"
        "    time.sleep(0.5)\n"
        "    print('tidied up')\n"
    )
    running.read_until("ready$", times=2)
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 5
    assert "worker1 | tidied up\n" in running.output


def test_a_second_interrupt_kills(start: Start) -> None:
    running = start(DEAF, options=("--grace", "600"))
    running.read_until("ready$", times=2)
    running.process.send_signal(signal.SIGINT)
    running.read_until("^farcall run: interrupted: forwarded to the 2 workers; interrupt again to kill$")
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 128 + signal.SIGINT
    assert "farcall run: interrupted twice: killing the 2 workers\n" in running.output


def test_if_nobody_reads_the_output_it_waits_and_interrupts_get_through(start: Start) -> None:
    running = start("while True: print('x' * 1000)", options=("--grace", "0.2"))
    wait_until(lambda: _has_stopped_reading(running.process.pid))  # so its memory stays bounded, and the workers wait
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(LIMIT) == 128 + signal.SIGINT


def _has_stopped_reading(pid: int) -> bool:
    """Whether the process, after a good deal of reading, reads nothing for a while."""

    def bytes_read() -> int:
        return int(Path(f"/proc/{pid}/io").read_text().split()[1])

    before = bytes_read()
    time.sleep(0.3)
    return bytes_read() == before > 1 << 18


@pytest.mark.parametrize(("name", "reached"), [("SIGINT", True), ("SIGQUIT", True), ("SIGTERM", False)])
def test_what_a_worker_has_started_gets_the_signals_of_a_keyboard_only(start: Start, name: str, reached: bool) -> None:
    running = start(
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})\n"
        "if child := os.fork():\n"
        "    print('ready')\n"
        "    signal.sigwait({signal.Signals[sys.argv[1]]})\n"
        "    os.waitpid(child, 0)\n"
        "else:\n"
        "    print('child got', bool(signal.sigtimedwait({signal.Signals[sys.argv[1]]}, float(sys.argv[2]))))\n",
        name,
        str(LIMIT / 2 if reached else 0.5),
        n=1,
    )
    running.read_until("ready$")
    running.process.send_signal(signal.Signals[name])
    assert running.end() == 0
    assert f"worker0 | child got {reached}\n" in running.output


def test_what_the_launcher_is_told_to_ignore_it_does_not_pass_on(start: Start, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as from nohup
    try:
        running = start(LISTENER, "SIGUSR1")
    finally:
        signal.signal(signal.SIGHUP, before)
    running.read_until("ready$", times=2)
    running.process.send_signal(signal.SIGHUP)
    running.process.send_signal(signal.SIGUSR1)
    assert running.end() == 0


# -- a terminal


@pytest.fixture
def in_terminal(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    """Starts a script as a shell does in the foreground of a terminal; gives the other side of the terminal."""
    keyboard, terminal = os.openpty()
    take_terminal = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    running: list[subprocess.Popen[bytes]] = []

    def start(script: str, *arguments: str) -> Running:
        (tmp_path / "script.py").write_text(script)
        process = subprocess.Popen(
            [sys.executable, "-c", take_terminal, *FARCALL, "run", "-n", "2", "script.py", *arguments],
            cwd=tmp_path,
            env={key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
            | {"TERM": "xterm"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        running.append(process)
        return Running(process, keyboard)

    yield start
    for process in running:
        process.kill()
        process.wait()
    os.close(keyboard)
    os.close(terminal)


def test_ctrl_c_reaches_each_worker_once(in_terminal: Callable[..., Running]) -> None:
    running = in_terminal(LISTENER, "SIGINT")
    running.read_until("ready\r$", times=2)
    os.write(running.fd, b"\x03")
    assert running.end() == 0
    assert running.output.count("got SIGINT") == 2
    assert "a second" not in running.output


def test_in_a_terminal_names_are_coloured(in_terminal: Callable[..., Running]) -> None:
    running = in_terminal("print('hello')")
    assert running.end() == 0
    assert sorted(running.output.splitlines()) == ["\x1b[33mworker1 | \x1b[0mhello", "\x1b[36mworker0 | \x1b[0mhello"]
