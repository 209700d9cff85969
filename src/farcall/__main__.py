"""`python -m farcall`: the `farcall` command where the script of that name is not on the path."""

from __future__ import annotations

import sys

from farcall.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
