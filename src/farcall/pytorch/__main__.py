"""`python -m farcall.pytorch script.py ...`: runs a program that imports `torch.distributed.rpc` on farcall.

As Python itself does: a script by its path, or a module after `-m`.
"""

from __future__ import annotations

import os
import runpy
import sys

from farcall.pytorch.installing import install


def main() -> None:
    """Runs the script that the command line names. Raises `SystemExit` if it names none."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m farcall.pytorch (script.py | -m module) [arguments ...]", file=sys.stderr)
        raise SystemExit(0 if arguments else 2)
    install()
    if arguments[0] == "-m" and len(arguments) > 1:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        script = os.path.abspath(arguments[0])  # Python itself makes the script's `__file__` one that stays right
        if not os.path.exists(script):
            print(f"python -m farcall.pytorch: there is no script {arguments[0]!r} here", file=sys.stderr)
            raise SystemExit(2)
        sys.argv = arguments
        sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
