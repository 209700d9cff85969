"""What others may call on a worker that restricts it, and what may be loaded from what they send: by name.

An entry of the list is a name or a pattern. `service` stands for itself and all that is below it (`service.predict`,
`service.Model.step`); `service.*` and `service.get_?` are matched as file names are. Besides the list there is always:
what `functions.exposed` has marked, plain data (numbers, sets, dates, arrays ...), and the few functions by which
farcall itself gathers and waits.

Rules
- A name is judged before it is looked up, so that nothing is imported for one who may not have it. A mark is looked for
  only in what is loaded already, without running any code.
- A module has more than its own: what it has imported can be reached through it. So unless that very name is on the
  list, what was found must be allowed by the name of where it is defined, too, and be a function or a class.
- Private names (with an underscore in front) are allowed only if they are on the list by themselves.
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

_OWN: Final = {
    f"farcall.collectives.{name}"
    for name in ("waiting_for_each_other", "coming_to_the_others", "_look_for_missing", "_time_is_over")
}
"""Functions of farcall's own that its workers call on each other; edges add theirs."""

_NUMPY: Final = frozenset({"numpy.ndarray", "numpy.dtype"}) | {
    f"numpy.{package}.{name}"
    for package in ("core", "_core")
    for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
}
"""What the pickles of arrays name. A pickle gets none of it, but what stands in for it (`serialization.arrays`)."""

_PLAIN: Final = (
    _NUMPY
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
    | {"farcall.rref._receive", "farcall.serialization.handles.take_offered"}
    | {f"farcall.serialization.raw.{name}" for name in ("bytes_of", "bytearray_of", "view_of", "array_of")}
    | {"farcall.protocol.ids.WorkerInfo", "farcall.collectives.Key"}
)
"""What plain data is made of, and what a failure may be; references too."""


def register_own(function: Callable[..., Any]) -> None:
    """Has all workers let others call that function of a module: one by which an edge of farcall's talks to itself.

    It must do no harm, whatever it is called with.
    """
    _OWN.add(f"{function.__module__}.{function.__qualname__}")


class Allowed:
    """One worker's list. It is the `Guard` of its unpickling."""

    def __init__(self, entries: Iterable[str], worker: str = "") -> None:
        """`worker`: whose list it is, for messages; they are read on other workers, too."""
        self._worker = f"worker {worker!r}" if worker else "this worker"
        entries = tuple(entries)
        self._names = frozenset(entry for entry in entries if not set(entry) & set("*?["))
        patterns = [fnmatch.translate(entry) for entry in entries if entry not in self._names]
        self._patterns = re.compile("|".join(patterns)) if patterns else None

    # Calls

    def check_function(self, module: str, name: str) -> None:
        """Raises `NotAllowedError` if others may not call that function here. Imports nothing."""
        full = f"{module}.{name}"
        if not (self._is_listed(full) or full in _OWN or _is_exposed(module, name)):
            raise NotAllowedError(self._refusal(f"to call `{full}`"))

    def has(self, full: str) -> bool:
        """Whether that very name is on the list."""
        return full in self._names

    def check_listed(self, full: str) -> None:
        """Raises `NotAllowedError` if others may not call what has that name and is no function of a module."""
        if not self._is_listed(full):
            raise NotAllowedError(
                f"it is not allowed to call `{full}` on {self._worker}; add that name to the option allow there"
            )

    def check_method(self, value: object, name: str) -> None:
        """Raises `NotAllowedError` if others may not call that method of that value here."""
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
        raise NotAllowedError(self._refusal(f"to call `{full}`"))

    def check_by_value(self) -> None:
        """Raises `NotAllowedError`: a function that comes with its code cannot be judged by its name."""
        raise NotAllowedError(
            f"it is not allowed to send a function by value (a lambda, a closure, a partial, a method of an object) to "
            f"{self._worker}: its option allow has names only. Call a function of a module by its name, with its "
            "arguments beside it; for a method, make the object there (farcall.remote), and call it on the reference"
        )

    # Loading

    def check_name(self, module: str, name: str) -> None:
        """See `Guard`."""
        full = f"{module}.{name}"
        if not (full in _PLAIN or self._is_listed(full) or full in _OWN or _is_exposed(module, name)):
            raise NotAllowedError(self._refusal(f"to load `{full}`"))

    def check_found(self, module: str, name: str, found: object) -> None:
        """See `Guard`."""
        full = f"{module}.{name}"
        if isinstance(found, ModuleType):
            raise NotAllowedError(
                f"it is not allowed to use the module `{full}` on {self._worker}; name a function or a class of it"
            )
        if full in self._names or full in _PLAIN or full in _OWN:
            return
        if not callable(found):
            # A pickle names classes and functions. A table of the module's would be its to change: there are opcodes.
            raise NotAllowedError(self._refusal(f"to use `{full}`, which is no function and no class,"))
        home = _home(name, found)
        if not (self._is_listed(home) or _is_marked(found)):
            raise NotAllowedError(self._refusal(f"to use `{home}` by the name of `{full}`"))

    def _refusal(self, what: str) -> str:
        return (
            f"it is not allowed {what} on {self._worker}; add it to the option allow there, or, if it is your own, "
            "mark it with farcall.exposed"
        )

    # Names

    def _is_listed(self, full: str) -> bool:
        if full in self._names:
            return True
        return not any(part.startswith("_") for part in _below_module(full)) and self._matches(full)

    def _matches(self, full: str) -> bool:
        if self._patterns is not None and self._patterns.match(full):
            return True
        end = len(full)
        while end > 0:
            if full[:end] in self._names:
                return True
            end = full.rfind(".", 0, end)
        return False


def _below_module(full: str) -> list[str]:
    """The parts of a name but the script's `__main__`, which is private by its looks alone."""
    parts = full.split(".")
    return parts[1:] if parts[0] in ("__main__", "__mp_main__") else parts


def _home(name: str, found: object) -> str:
    """The name by which that is where it is defined."""
    module = getattr(found, "__module__", None)
    if not isinstance(module, str):
        # Methods of builtin types do not say where they are from (`random.random` is one): their type does.
        owner = getattr(found, "__self__", getattr(found, "__objclass__", found))
        cls = owner if isinstance(owner, type) else type(owner)
        return f"{cls.__module__}.{cls.__qualname__}.{name}"
    return f"{module}.{getattr(found, '__qualname__', None) or name}"


def _is_exposed(module: str, name: str) -> bool:
    """Whether what is loaded under that name is marked. Looks at tables only: no code runs, nothing is imported."""
    found: Any = sys.modules.get("__main__" if module == "__mp_main__" else module)
    for number, part in enumerate(name.split(".")):
        if found is None or (number and not isinstance(found, type)):
            return False
        outer, found = found, vars(found).get(part)
        if number and vars(outer).get(EXPOSED) is True and not part.startswith("_"):
            return found is not None
    return _is_marked(found)


def _is_marked(target: Any) -> bool:
    function = getattr(target, "__func__", target) if isinstance(target, (staticmethod, classmethod)) else target
    try:
        return vars(function).get(EXPOSED) is True
    except TypeError:  # it has no attributes
        return False
