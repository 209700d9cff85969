"""Gives each file to a free process, and writes down which files failed: `python examples/compress_files.py FILE ...`.

Each FILE is compressed into FILE.gz by one of four processes, which start and end with the `with` block. A file that
cannot be read fails alone, and the others are compressed all the same.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import farcall


@farcall.idempotent  # it only reads: if a process dies, another one may do its file again
def compress(path: Path) -> bytes:
    return gzip.compress(path.read_bytes())


def compress_all(paths: list[Path], processes: int = 4) -> dict[Path, Exception]:
    """Returns the errors of those that failed."""
    failed = {}
    with farcall.engines.local(processes) as group:
        for outcome in group.workers(others=True).options(timeout=30).map(compress, paths).outcomes():
            if outcome.error is not None:
                failed[outcome.item] = outcome.error
            else:
                outcome.item.with_name(f"{outcome.item.name}.gz").write_bytes(outcome.result())
    return failed


if __name__ == "__main__":
    files = [Path(argument) for argument in sys.argv[1:]]
    failures = compress_all(files)
    for path, error in sorted(failures.items()):
        print(f"{path.name}: {type(error).__name__}")
    print(f"{len(files) - len(failures)} of {len(files)} files compressed")
