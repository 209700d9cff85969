"""Coverage-guided fuzzing of one target with atheris: `python tests/fuzz/run.py TARGET [libFuzzer's options]`.

`make fuzz` runs all, for so many inputs each (ARGS="-runs=2000000").
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Runs until the options end it, or the target raises."""
    import atheris

    sys.path.insert(0, str(Path(__file__).parents[1]))
    with atheris.instrument_imports(include=["farcall"]):
        from fuzz.targets import CORPUS, TARGETS

    name, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        for number, data in enumerate(CORPUS[name]):
            Path(directory, str(number)).write_bytes(data)
        atheris.Setup(
            [sys.argv[0], *options, "-timeout=10", "-rss_limit_mb=2048", "-max_len=4096", directory], TARGETS[name]
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
