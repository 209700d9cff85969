"""The allow-list of a worker: which functions other workers may call, and which types their messages may contain.

The entries of the list (the option `allow`) are names and patterns. The name `service` stands for itself and everything
below it: `service.predict`, `service.Model.step`. Patterns such as `service.*` and `service.get_?` are matched as file
names are (`fnmatch`). Always allowed are functions and classes marked by `farcall.exposed`, plain data (numbers, sets,
dates, arrays ...) and the few functions by which farcall's own workers synchronise.

Rules
- A name is checked before it is looked up, so that a name that is not allowed causes no import. Marks are looked for
  only in modules that are loaded already, without running any code.
- A module can be used to reach what it has imported (`service.os.system`). So the object found under a name must be a
  function or a class, and must also be allowed under the name of the place where it is defined. An exact entry for the
  name lifts both conditions.
- Private names (those that begin with an underscore) need an exact entry.
"""

from __future__ import annotations

import builtins
import fnmatch
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final

from farcall import errors
from farcall.errors import NotAllowedError
from farcall.functions import EXPOSED
from farcall.protocol.fields import quoted

_INTERNAL_FUNCTIONS: Final = {
    f"farcall.collectives.{name}"
    for name in ("waiting_for_each_other", "coming_to_the_others", "_look_for_missing", "_time_is_over")
}
"""The full names of farcall's own functions that workers call on each other. See `register_internal_function`."""

_NUMPY_NAMES: Final = frozenset({"numpy.ndarray", "numpy.dtype"}) | {
    f"numpy.{package}.{name}"
    for package in ("core", "_core")
    for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
}
"""The names in pickles of arrays. The unpickler gives a pickle safe functions instead (`restricted.arrays`)."""

_PLAIN_NAMES: Final = (
    _NUMPY_NAMES
    | {f"builtins.{name}" for name in ("bytearray", "complex", "frozenset", "range", "set", "slice")}
    | {
        f"{module.__name__}.{name}"
        for module in (builtins, errors)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    | {f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")}
    | {"collections.OrderedDict", "collections.deque", "collections.Counter", "decimal.Decimal", "fractions.Fraction"}
    | {"uuid.UUID"}
    | {f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")}
    | {"farcall.rref._receive", "farcall.serialization.references.take_offered"}
    | {f"farcall.serialization.buffers.rebuild_{name}" for name in ("bytes", "bytearray", "memoryview", "array")}
    | {"farcall.protocol.ids.WorkerInfo", "farcall.collectives.Key"}
)
"""The full names of the types of plain data, of builtin exceptions and farcall's own, and of what rebuilds references
and buffers. A message may always contain these; being here does not make a name callable."""


def register_internal_function(function: Callable[..., Any]) -> None:
    """Allows other workers to call a function on every worker of this process, whatever its allow-list says.

    For functions by which parts of farcall, such as `farcall.pytorch`, talk to themselves on other workers. Registering
    a function again has no effect.

    Args:
        function: A function of a module. It must be harmless with any arguments, which is not checked.
    """
    _INTERNAL_FUNCTIONS.add(f"{function.__module__}.{function.__qualname__}")


class AllowList:
    """The allow-list of one worker: which functions others may call, and which types their messages may contain.

    Each method named `check_...` returns None for what is allowed, and raises `NotAllowedError` for what is not.
    Functions and classes marked by `farcall.exposed` and farcall's own functions are always allowed; in messages, so is
    plain data. The restricted unpickler asks `check_name` and `check_found` about each name in a message.

    Args:
        entries: Names such as `service.predict` and patterns such as `service.*`. A name stands for itself and
            everything below it. Without entries, only what is always allowed is allowed. Entries are not checked.
        worker: The name of the worker, for error messages, which other workers receive; "this worker" if empty.
    """

    def __init__(self, entries: Iterable[str], worker: str = "") -> None:
        self._worker = f"worker {worker!r}" if worker else "this worker"
        entries = tuple(entries)
        self._names = frozenset(entry for entry in entries if not set(entry) & set("*?["))
        patterns = [fnmatch.translate(entry) for entry in entries if entry not in self._names]
        self._patterns = re.compile("|".join(patterns)) if patterns else None

    # Calls

    def check_function(self, module: str, name: str) -> None:
        """Returns None if other workers may call the function, else raises `NotAllowedError`. Imports nothing.

        A function is allowed if it is on the list, marked by `farcall.exposed`, or one of farcall's own.

        Args:
            module: The name of the function's module. It need not exist.
            name: The name of the function within the module, such as `predict` or `Model.step`.
        """
        full = f"{module}.{name}"
        if not (self._is_listed(full) or full in _INTERNAL_FUNCTIONS or _is_exposed(module, name)):
            raise NotAllowedError(self._refusal(f"calls of `{full}`"))

    def has(self, full: str) -> bool:
        """Returns True if exactly the full name `full`, such as `service.predict`, is an entry of the list; else False.

        Entries that allow it in other ways do not count: patterns, its module and its class. Returns False if `full` is
        itself a pattern, such as `service.*`.
        """
        return full in self._names

    def check_listed(self, full: str) -> None:
        """Returns None if an entry of the list matches the full name `full`, else raises `NotAllowedError`.

        An entry matches if it is that name, a beginning of it such as its module, or a pattern for it. If a part of the
        name begins with an underscore, only an entry with exactly that name matches. This is for names that are not
        functions of a module, such as torch operators. `farcall.exposed` does not count.
        """
        if not self._is_listed(full):
            raise NotAllowedError(
                f"calls of `{quoted(full)}` are not allowed on {self._worker}; add that name to the option allow there"
            )

    def check_method(self, value: object, name: str) -> None:
        """Returns None if other workers may call the method `name` of `value`, else raises `NotAllowedError`.

        A method is allowed if its class or the method itself is on the list or marked by `farcall.exposed`. The list is
        searched for the class of `value`, not for its base classes. Private methods need an exact entry or a mark of
        their own; `__call__` counts as public. Whether the method exists is not checked.
        """
        cls = type(value)
        full = f"{cls.__module__}.{cls.__qualname__}.{name}"
        public = not name.startswith("_") or name == "__call__"
        if full in self._names or (public and (self._matches(full) or vars(cls).get(EXPOSED) is True)):
            return
        for base in cls.__mro__:
            if name in vars(base):
                if _is_marked(vars(base)[name]) or (public and vars(base).get(EXPOSED) is True):
                    return
                break
        raise NotAllowedError(self._refusal(f"calls of `{full}`"))

    def check_by_value(self) -> None:
        """Raises `NotAllowedError`, always: for a function that is sent with its code, which has no name to check."""
        raise NotAllowedError(
            f"functions that are sent by value (lambdas, closures, partials, methods of an object) are not allowed on "
            f"{self._worker}, because its option allow has names only. Call a function of a module and pass its "
            "arguments separately; for a method, create the object there with farcall.remote and call the method on "
            "the reference"
        )

    # Loading

    def check_name(self, module: str, name: str) -> None:
        """Returns None if a message may contain the name of this function or class, else raises `NotAllowedError`.

        Allowed are plain data, names on the list, farcall's own functions and what `farcall.exposed` marks. Imports
        nothing. `check_found` must follow when the object was looked up.

        Args:
            module: The name of the module. It need not exist.
            name: The name within the module, such as `Model` or `Model.step`.
        """
        full = f"{module}.{name}"
        if not (
            full in _PLAIN_NAMES or self._is_listed(full) or full in _INTERNAL_FUNCTIONS or _is_exposed(module, name)
        ):
            raise NotAllowedError(self._refusal(f"messages that contain `{full}`"))

    def check_found(self, module: str, name: str, found: object) -> None:
        """Returns None if the object found under an allowed name may be used, else raises `NotAllowedError`.

        The object must be a function or a class, and must also be allowed under the name of the place where it is
        defined. An exact entry for its name lifts both conditions. Plain data and farcall's own functions always pass.

        Args:
            module: The name of the module in which it was looked up.
            name: Its name within that module.
            found: The object. A module is always refused.
        """
        full = f"{module}.{name}"
        if isinstance(found, ModuleType):
            raise NotAllowedError(
                f"uses of the module `{quoted(full)}` are not allowed on {self._worker}; name a function or class of it"
            )
        if full in self._names or full in _PLAIN_NAMES or full in _INTERNAL_FUNCTIONS:
            return
        if not callable(found):
            # A pickle needs classes and functions only. It could change a dict or list of a module: there are opcodes
            # for that.
            raise NotAllowedError(self._refusal(f"uses of `{full}`, which is neither a function nor a class"))
        home = _home(name, found)
        if not (self._is_listed(home) or _is_marked(found)):
            raise NotAllowedError(self._refusal(f"uses of `{home}` under the name `{full}`"))

    def _refusal(self, what: str) -> str:
        """Returns the error message for something that is not allowed, with what to do about it.

        Args:
            what: What is not allowed, as a plural, for example "calls of `os.system`". Unprintable characters are
                escaped.
        """
        return (
            f"{quoted(what)} are not allowed on {self._worker}; add the name to the option allow there, or mark the "
            "function or class with farcall.exposed if it is your own"
        )

    # Names

    def _is_listed(self, full: str) -> bool:
        """Returns True if the full name is an entry itself, or has no private part and matches an entry; else False.

        A private part begins with an underscore. A leading `__main__` is not private.
        """
        if full in self._names:
            return True
        return not any(part.startswith("_") for part in _below_module(full)) and self._matches(full)

    def _matches(self, full: str) -> bool:
        """Returns True if a pattern matches the full name, or if the name or a beginning of it is an entry; else False.

        A beginning is its class, its module or a package of it.
        """
        if self._patterns is not None and self._patterns.match(full):
            return True
        end = len(full)
        while end > 0:
            if full[:end] in self._names:
                return True
            end = full.rfind(".", 0, end)
        return False


def _below_module(full: str) -> list[str]:
    """Returns the parts of a full name between its dots, without a leading `__main__` or `__mp_main__`."""
    parts = full.split(".")
    return parts[1:] if parts[0] in ("__main__", "__mp_main__") else parts


def _home(name: str, found: object) -> str:
    """Returns the full name of the place where an object is defined, which may not be where it was found.

    A method of a builtin type counts as defined in that type.

    Args:
        name: The name under which it was found. It is used if the object does not know its own name.
        found: The object, of any type.
    """
    module = getattr(found, "__module__", None)
    if not isinstance(module, str):
        # Methods of builtin types, such as `random.random`, have no module; their type has.
        owner = getattr(found, "__self__", getattr(found, "__objclass__", found))
        cls = owner if isinstance(owner, type) else type(owner)
        return f"{cls.__module__}.{cls.__qualname__}.{name}"
    return f"{module}.{getattr(found, '__qualname__', None) or name}"


def _is_exposed(module: str, name: str) -> bool:
    """Returns True if the function, method or class `name` of the module is marked by `farcall.exposed`; else False.

    The mark of a class also counts for its public methods. Looks only into the dictionaries of modules and classes:
    nothing is imported, and no code runs. Returns False if the module is not loaded or has no such name.
    """
    found: Any = sys.modules.get("__main__" if module == "__mp_main__" else module)
    for number, part in enumerate(name.split(".")):
        if found is None or (number and not isinstance(found, type)):
            return False
        outer, found = found, vars(found).get(part)
        if number and vars(outer).get(EXPOSED) is True and not part.startswith("_"):
            return found is not None
    return _is_marked(found)


def _is_marked(target: Any) -> bool:
    """Returns True if the function or class itself is marked by `farcall.exposed`; False for all other objects."""
    function = getattr(target, "__func__", target) if isinstance(target, (staticmethod, classmethod)) else target
    try:
        return vars(function).get(EXPOSED) is True
    except TypeError:
        return False
