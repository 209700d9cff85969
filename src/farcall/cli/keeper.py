"""Ends what the workers left when the launcher itself was killed.

The kernel kills the workers with the launcher (see `bootstrap`), but not the processes that the workers have started.
So one small process, run as a file, holds the end of a pipe from the launcher and reads lines:

    +123        the process group 123 belongs to a worker
    -123        it is gone

When the pipe ends, by whatever end of the launcher, it kills the groups that are left; after an orderly end there are
none. It runs in a session of its own, so nothing meant for the launcher reaches it. It imports nothing of farcall.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable


def groups_left(lines: Iterable[str]) -> set[int]:
    """Reads to the end of `lines`; the groups that were named and not taken back."""
    groups: set[int] = set()
    for line in lines:
        if not line.endswith("\n"):
            break  # the launcher died while it wrote: half a number is another group's number
        number = int(line[1:])
        if line[0] == "+":
            groups.add(number)
        else:
            groups.discard(number)
    return groups


def main() -> None:
    """Waits for the end of standard input, then kills the groups that are left."""
    for group in groups_left(sys.stdin):
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


if __name__ == "__main__":
    main()
