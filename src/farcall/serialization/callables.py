"""Sends functions by name, and finds them on the worker that runs them.

A function that can be found in a module is sent as its *encoded name*: the module, a zero byte, and the dotted path in
the module, in UTF-8. It is the same in every call, so both sides cache what they know about it. They do not cache the
function itself: each call looks the name up again, so that a patched or reloaded module takes effect and nothing is
kept alive.

A function that cannot be found by name (a lambda, closure, bound method, partial or callable object, or anything in an
interactive `__main__`) is sent by value, together with the arguments (`payload`).

The script is always called `__main__` in a message, although `multiprocessing` calls it `__mp_main__` in a child.
Another worker may have imported this worker's script as a module and use the module's name. Such names are looked up in
`__main__`: importing the file once more would create functions that see other globals than those of the running script.
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
"""The names of the script. The second is its name in a child that multiprocessing has spawned."""

_MAX_NAMES: Final = 4096
"""How many functions are cached, more than a program uses. The limit is for programs that keep creating functions."""

DEFINE_IN_SCRIPT_ADVICE: Final = "define it at the top level of the script, before init_rpc, on every worker"
"""The advice in error messages for a function or class that the script of another worker defines and ours does not."""

_modules = sys.modules

_encoded: dict[int, tuple[bytes, str, attrgetter[Any]]] = {}
"""For the id of a function: its encoded name, its module, and the path in the module. Another function may get the same
id later; this does no harm, because each use checks that the name leads to the function at hand."""
_names: dict[bytes, tuple[str, attrgetter[Any]]] = {}
"""For an encoded name: the module and the path in the module."""


def is_interactive() -> bool:
    """Returns True if `__main__` has no file (a notebook, a prompt), so no other worker has its functions.

    Returns False for a script.
    """
    return not getattr(_modules["__main__"], "__file__", None)


def leads_to(module: str, qualname: str, target: object) -> bool:
    """Returns True if the dotted name `qualname` in the loaded module `module` is exactly the object `target` now.

    Returns False if it is another object, or if the module is not loaded or has no such name. Never raises, and imports
    nothing.
    """
    try:
        return attrgetter(qualname)(_modules[module]) is target
    except Exception:  # no such module or attribute; modules may compute attributes and raise anything
        return False


def encode_function(function: Callable[..., Any]) -> bytes | None:
    """Returns the encoded name of a function: its module, a zero byte and its dotted path in the module, in UTF-8.

    Returns None if other workers cannot find the function by name (a lambda, a closure, a partial): it must be sent by
    value. Also returns None for an object without a name, such as a number. Never raises.
    """
    known = _encoded.get(id(function))
    if known is not None:
        blob, module, path = known
        try:
            if path(_modules[module]) is function:
                return blob
        except Exception:  # the module or the attribute does not exist any more
            pass
    return _name_function(function)


def resolve_function(blob: bytes, worker: str = "") -> Any:
    """Returns the function with an encoded name; imports its module if necessary.

    The name is looked up in each call, so a patched module takes effect. Whether the object is callable is not checked.

    Args:
        blob: The encoded name, as `encode_function` returned it: the module, a zero byte and the dotted path.
        worker: The name of this worker, for error messages; empty if unknown.

    Raises:
        SerializationError: The name is not valid, the module cannot be imported, or it has no such function.
    """
    known = _names.get(blob)
    if known is not None:
        module, path = known
        try:
            return path(_modules[module])
        except Exception:  # it was removed, or another thread is still importing the module
            pass
    return _find_function(blob, worker)


def callable_name(function: Any) -> str:
    """Returns a readable name for messages: "train", "Model.step", "<lambda>" or "partial(train)". Never raises.

    A str is returned as it is. An object that cannot be inspected is called "unnamed function".
    """
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
    """Returns the encoded name of a function that is not cached, and caches it; None if it cannot be sent by name.

    The encoded name is the module, a zero byte and the dotted path in the module, in UTF-8. Never raises.
    """
    try:
        module, qualname = function.__module__, function.__qualname__
        if "<" in qualname:  # <lambda> or <locals>; decided early, because such functions are sent often
            return None
        if module in _MAIN_NAMES:
            module = "__main__"
            if is_interactive():
                return None
        if not leads_to(module, qualname, function):
            return None
        blob = f"{module}\0{qualname}".encode()
    except Exception:  # it has no such attributes, or computes them, or they are not text
        return None
    if len(_encoded) >= _MAX_NAMES:
        _encoded.clear()
    _encoded[id(function)] = blob, module, attrgetter(qualname)
    return blob


def _find_function(blob: bytes, worker: str) -> Any:
    """Returns the function with an encoded name that is not cached, and caches the name.

    `blob` is the encoded name: the module, a zero byte and the dotted path in the module, in UTF-8. Imports the module
    if necessary. Raises `SerializationError` if the name is not valid, the module cannot be imported, or it has no such
    function. `worker` is the name of this worker, for the message; empty if unknown.
    """
    worker = f"worker {worker!r}" if worker else "this worker"
    try:
        module, _, qualname = blob.decode().partition("\0")
    except UnicodeDecodeError:
        raise SerializationError(f"{worker} got a call of a function whose name is not UTF-8: {blob!r}") from None
    advice = "is the same code installed there?"
    if module in _MAIN_NAMES:
        module = "__main__"
        advice = f"{DEFINE_IN_SCRIPT_ADVICE}, or pass a lambda."
    elif _is_the_script(module):
        # Pickle looks up the classes of the script by itself, under the module's name.
        _modules.setdefault(module, _modules["__main__"])
        module = "__main__"
    try:
        # Even if the module is in sys.modules: another thread may still be importing it, and this waits for the end.
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
            f"{worker} has no function `{qualname}` in module `{module}`: {advice} The function was sent by its name: "
            "the RPC pickler does not serialize the code of a module's functions"
        ) from error
    if len(_names) >= _MAX_NAMES:
        _names.clear()
    _names[blob] = module, path
    return function


def _is_the_script(module: str) -> bool:
    """Returns True if a module of that name would be loaded from the file that runs as `__main__`; else False.

    Returns False if there is no such module, or `__main__` has no file. If the program was started with `python -m`,
    only compares `module` with the full name of the module that runs.
    """
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
