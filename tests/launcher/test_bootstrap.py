from __future__ import annotations

import os
import signal
import subprocess
import sys

from farcall.launcher import bootstrap

BOOTSTRAP = [sys.executable, "-I", "-S", bootstrap.__file__]


def test_it_becomes_the_program_with_its_arguments() -> None:
    show = "import sys, signal; print(sys.argv, signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    command = [*BOOTSTRAP, str(os.getpid()), sys.executable, "-c", show, "a b", "--", "-I"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (result.stdout, result.stderr) == ("['-c', 'a b', '--', '-I'] True\n", "")


def test_the_program_is_killed_with_its_parent() -> None:
    # A parent in between, which ends once the program runs. The pipe's end tells that the program has ended, too.
    program = "import os, sys, time; os.write({end}, b'here'); time.sleep(600)"
    parent = (
        "import os, subprocess, sys\n"
        "end = int(sys.argv[1])\n"
        f"program = {program!r}.format(end=end)\n"
        f"subprocess.Popen([*{BOOTSTRAP!r}, str(os.getpid()), sys.executable, '-c', program], pass_fds=[end])\n"
        "sys.stdin.read()\n"
        "os._exit(0)\n"
    )
    read_end, write_end = os.pipe()
    command = [sys.executable, "-c", parent, str(write_end)]
    with (
        os.fdopen(read_end, "rb", buffering=0) as told,
        subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[write_end]) as process,
    ):
        os.close(write_end)
        assert told.read(4) == b"here"
        process.communicate()
        assert told.read() == b""


def test_it_ends_if_the_parent_is_gone_already() -> None:
    someone_else = os.getppid()
    result = subprocess.run(
        [*BOOTSTRAP, str(someone_else), sys.executable, "-c", "print('alive')"], capture_output=True
    )
    assert result.returncode == -signal.SIGKILL
    assert result.stdout == b""
