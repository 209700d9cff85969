"""How a function is named on the wire, and found again where it shall run.

A function that a module can name travels as that name: `module`, a zero byte, the dotted path in it, in UTF-8. The
same bytes stand for it in every call, so both sides keep what they worked out about them. They keep no function: each
call looks the name up anew, so that a patched or reloaded module is honoured, and nothing is kept alive.

What no name leads to (lambdas, closures, bound methods, partials, callable objects, all of an interactive `__main__`)
has no such bytes: it travels by value among the arguments, which is the `pickler`'s work.

The script is `__main__` on the wire, whatever `multiprocessing` calls it in a child. Another worker may have imported
this worker's script as a module, and ask for its functions under the module's name. They are those of `__main__` all
the same: importing the file once more would give functions that see other globals than the script that runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Final

from farcall.errors import SerializationError

_MAIN_NAMES: Final = ("__main__", "__mp_main__")
"""What the script may be called: the second is its name in a child that multiprocessing has spawned."""

_MAX_NAMES: Final = 4096
"""More names than a program has; whoever makes up new ones without end shall not fill the memory."""

IN_THE_SCRIPT: Final = "define it at the top level of the script, before init_rpc, on every worker"
"""Advice for what one worker's script has, and another's has not."""

_modules = sys.modules

# What is kept: for the id of a function, its bytes and the name behind them; for bytes, the name. An id may be used
# again by another function, which does no harm, as the name is checked against the function in hand.
_encoded: dict[int, tuple[bytes, str, attrgetter[Any]]] = {}
_names: dict[bytes, tuple[str, attrgetter[Any]]] = {}


def is_interactive() -> bool:
    """Whether `__main__` is a notebook, a prompt or the like: nobody else has what it defines."""
    return not getattr(_modules["__main__"], "__file__", None)


def leads_to(module: str, qualname: str, target: object) -> bool:
    """Whether that name leads to that very object now."""
    try:
        return attrgetter(qualname)(_modules[module]) is target
    except Exception:  # no such module or attribute; modules may compute attributes and raise anything
        return False


def encode_function(function: Callable[..., Any]) -> bytes | None:
    """The bytes that name a function, or None if it must travel by value. Never raises."""
    known = _encoded.get(id(function))
    if known is not None:
        blob, module, path = known
        try:
            if path(_modules[module]) is function:
                return blob
        except Exception:  # the name leads nowhere any more
            pass
    return _name_function(function)


def resolve_function(blob: bytes, worker: str = "") -> Any:
    """The function of that name, importing its module if need be. `worker`, the name of who looks, is for messages.

    Raises `SerializationError` if there is none here.
    """
    known = _names.get(blob)
    if known is not None:
        module, path = known
        try:
            return path(_modules[module])
        except Exception:  # gone, or not there yet: another thread may be importing it
            pass
    return _find_function(blob, worker)


def callable_name(function: Any) -> str:
    """A name for people: `train`, `Model.step`, `<lambda>`, `partial(train)`. Text is a name already. Never raises."""
    try:
        if type(function) is str:
            return function
        if isinstance(function, partial):
            return f"partial({callable_name(function.func)})"
        name = getattr(function, "__qualname__", None)
        if type(name) is not str:
            name = f"{type(function).__qualname__}.__call__"
        return name.rpartition("<locals>.")[2] or name
    except Exception:
        return "unnamed function"


def _name_function(function: Any) -> bytes | None:
    try:
        module, qualname = function.__module__, function.__qualname__
        if "<" in qualname:  # <lambda>, <locals>: a quick end for what is sent often
            return None
        if module in _MAIN_NAMES:
            module = "__main__"
            if is_interactive():
                return None
        if not leads_to(module, qualname, function):
            return None
        blob = f"{module}\0{qualname}".encode()
    except Exception:  # it has no such attributes, computes them, or they are no text
        return None
    if len(_encoded) >= _MAX_NAMES:
        _encoded.clear()
    _encoded[id(function)] = blob, module, attrgetter(qualname)
    return blob


def _find_function(blob: bytes, worker: str) -> Any:
    worker = f"worker {worker!r}" if worker else "this worker"
    try:
        module, _, qualname = blob.decode().partition("\0")
    except UnicodeDecodeError:
        raise SerializationError(f"{worker} was asked for a function by a name that is no text: {blob!r}") from None
    advice = "is the same code installed there?"
    if module in _MAIN_NAMES:
        module = "__main__"
        advice = f"{IN_THE_SCRIPT}, or pass a lambda."
    elif _is_the_script(module):
        # For the classes of the script, which pickle looks up by itself.
        _modules.setdefault(module, _modules["__main__"])
        module = "__main__"
    try:
        # Also when it is in sys.modules already: this waits until another thread is through with importing it.
        found = importlib.import_module(module)
    except Exception as error:
        raise SerializationError(
            f"{worker} cannot import module `{module}` for its function `{qualname}` "
            f"({type(error).__name__}: {error}): {advice}"
        ) from error
    path = attrgetter(qualname)
    try:
        function = path(found)
    except Exception as error:
        raise SerializationError(
            f"{worker} has no function `{qualname}` in module `{module}`: {advice} It goes by its name: the "
            "RPC pickler does not serialize the code of a module's functions"
        ) from error
    if len(_names) >= _MAX_NAMES:
        _names.clear()
    _names[blob] = module, path
    return function


def _is_the_script(module: str) -> bool:
    """Whether a module of that name would come from the file that runs as `__main__`."""
    main = _modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m
        return bool(spec.name == module)
    file = getattr(main, "__file__", None)
    if not file or os.path.splitext(os.path.basename(file))[0] != module.rpartition(".")[2]:
        return False
    try:
        spec = importlib.util.find_spec(module)
        return spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file)
    except (ImportError, ValueError, OSError):
        return False
