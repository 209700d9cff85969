from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from farcall.launcher import keeper


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([], set()),
        (["+1\n", "+22\n"], {1, 22}),
        (["+1\n", "+22\n", "-1\n"], {22}),
        (["+1\n", "-1\n", "-1\n"], set()),
        (["+1\n", "+2"], {1}),  # cut short: it may be the beginning of another number
    ],
)
def test_groups_that_were_not_taken_back_are_left(lines: list[str], left: set[int]) -> None:
    assert keeper.read_remaining_groups(lines) == left


def test_at_the_end_of_the_pipe_it_kills_what_is_left_and_only_that() -> None:
    with (
        subprocess.Popen(["sleep", "60"], start_new_session=True) as left,
        subprocess.Popen(["sleep", "60"], start_new_session=True) as taken_back,
    ):
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", keeper.__file__],
                input=f"+{left.pid}\n+{taken_back.pid}\n-{taken_back.pid}\n".encode(),
                check=True,
                timeout=30,
            )
            assert left.wait(30) == -signal.SIGKILL
            assert taken_back.poll() is None
        finally:
            left.kill()
            taken_back.kill()


def test_a_group_that_is_gone_is_no_matter() -> None:
    with subprocess.Popen(["true"], start_new_session=True) as gone:
        pass
    command = [sys.executable, "-I", "-S", keeper.__file__]
    subprocess.run(command, input=f"+{gone.pid}\n".encode(), check=True, timeout=30)
