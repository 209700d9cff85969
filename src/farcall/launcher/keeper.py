"""Kills the processes that workers have started, if the launcher itself was killed.

The kernel kills the workers together with the launcher (see `bootstrap`), but not the workers' children. So the
launcher starts this file as a small process, and sends it lines over a pipe:

    +123        process group 123 belongs to a worker
    -123        process group 123 has ended

However the launcher ends, the pipe ends with it. Then this process kills the groups that are left. After an orderly run
there are none. This process has a session of its own, so signals for the launcher do not reach it. It imports nothing
of farcall.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable


def read_remaining_groups(lines: Iterable[str]) -> set[int]:
    """Reads all lines, and returns the process groups that were added and not removed again.

    A line is "+123" to add the group 123 and "-123" to remove it, with a line break. Removing an unknown group has no
    effect. An unfinished last line is ignored. Empty input returns an empty set. Raises `ValueError` if a line has no
    number.
    """
    groups: set[int] = set()
    for line in lines:
        if not line.endswith("\n"):
            break  # the launcher died while writing; half a number would name another process group
        number = int(line[1:])
        if line[0] == "+":
            groups.add(number)
        else:
            groups.discard(number)
    return groups


def main() -> None:
    """Reads lines from standard input to its end, then kills the process groups that are left.

    A line is "+123" to add the group 123 and "-123" to remove it. Groups that have ended or belong to another user are
    skipped. Does nothing if none are left.
    """
    for group in read_remaining_groups(sys.stdin):
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


if __name__ == "__main__":
    main()
