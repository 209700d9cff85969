"""`python -m farcall.pytorch script.py ...`: runs a program that imports `torch.distributed.rpc` on farcall.

The command accepts what `python` accepts: a script, a directory or zip file with a `__main__.py`, or a module after
`-m`.

The program becomes the `__main__` module of the process, and stays that until the process ends. Workers often serve
calls after the last line of the script, from an `atexit` handler (`atexit.register(rpc.shutdown)`) or from threads. A
call names its function as `__main__.f`, so `sys.modules["__main__"]` must still hold `f` then. That rules out
`runpy.run_path` and `runpy.run_module`, which remove the program's module when its last line has run. Processes that
`multiprocessing` spawns find the program by `__main__.__spec__` or `__main__.__file__`, as they do under `python`.
"""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn, cast

from farcall.pytorch.installation import install

_USAGE = "usage: python -m farcall.pytorch (script.py | -m module) [arguments ...]"


def main() -> None:
    """Runs the program that the command line names, after torch's RPC was replaced by farcall.

    The program becomes the module `__main__` of this process.

    Raises:
        SystemExit: Status 2 if the command line names no program, or a script that does not exist; 0 after `--help`. A
            message in place of a status if there is no such module after `-m`.
        BaseException: Whatever the program raises.
    """
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stderr)
        raise SystemExit(0 if arguments else 2)
    if arguments == ["-m"]:
        _exit_with_usage_error(f"-m needs the name of a module\n{_USAGE}")
    if arguments[0] != "-m" and not os.path.exists(arguments[0]):
        _exit_with_usage_error(f"the script {arguments[0]!r} does not exist")
    install()
    sys.modules["__main__"] = program = ModuleType("__main__")
    program.__dict__["__builtins__"] = builtins
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        _run_as_main(arguments[1])
    elif pkgutil.get_importer(arguments[0]) is not None:  # a directory or zip file
        sys.argv = arguments
        sys.path[0 : 0 if sys.flags.safe_path else 1] = [os.path.abspath(arguments[0])]
        _run_as_main("__main__", alter_argv=False)
    else:
        sys.argv = arguments
        _run_script(arguments[0], program)


def _run_as_main(module: str, alter_argv: bool = True) -> None:
    """Runs a module as `__main__`, like `python -m`. Raises what the module raises.

    Raises `SystemExit` with a message if there is no such module.

    Args:
        module: The name of the module; `__main__` for the directory or zip file at the head of `sys.path`.
        alter_argv: Whether `sys.argv[0]` is set to the path of the module.
    """
    # `python -m` itself calls this function. Unlike `run_module`, it runs the module in `sys.modules["__main__"]`.
    cast(Any, runpy)._run_module_as_main(module, alter_argv)


def _run_script(path: str, program: ModuleType) -> None:
    """Runs the script at `path` in the module `program`, as `python` runs a script. Raises what the script raises.

    Sets `sys.path[0]` to its directory. Raises `OSError` if it cannot be read, and `SyntaxError` if it cannot be
    compiled.
    """
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    file = os.path.abspath(path)  # as Python does, so that `__file__` stays valid after a `chdir`
    code, loader = _load_code(file)
    program.__file__ = file
    program.__loader__ = loader
    program.__dict__["__cached__"] = None
    exec(code, program.__dict__)


def _load_code(file: str) -> tuple[CodeType, SourceFileLoader | SourcelessFileLoader]:
    """Returns the code of a script or a compiled `.pyc` file, and its loader.

    Raises `OSError` if it cannot be read, and `SyntaxError` if a script cannot be compiled. Raises `ImportError` if
    another version of Python has compiled a `.pyc` file, and `EOFError` if such a file is cut short.
    """
    if file.endswith(".pyc"):
        compiled = SourcelessFileLoader("__main__", file)
        return cast(CodeType, compiled.get_code("__main__")), compiled
    source = SourceFileLoader("__main__", file)
    # `get_code` would write a cache file, which `python` does not do for scripts.
    return compile(source.get_data(file), file, "exec", dont_inherit=True), source


def _exit_with_usage_error(why: str) -> NoReturn:
    """Prints `why` the command line is wrong to standard error, and exits with status 2 (raises `SystemExit`)."""
    print(f"python -m farcall.pytorch: {why}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
