"""Unpickling that asks before it loads: for workers that restrict what others may send them.

A pickle names functions and classes, and unpickling calls them. Here each name is asked about before its module is
imported or anything of it is used, and what was found is asked about once more, as a module may hold what is not its
own (`service.os.system`). Who decides is handed in (`Guard`).

Rules
- A name that leads through anything but classes is refused: from a function or an object one gets everywhere.
- What a name led to is not changed: pickles can set attributes of whatever they got hold of, classes and functions too,
  and with that the mark by which one is allowed. Only what was made by the pickle itself may be given a state.
- The types of numpy's arrays are made anew, never set (`array_types`).
- What is refused raises `NotAllowedError`, and nothing of it has run.
- `loads_plain` is for what is plain data by its nature: there is nothing to ask about.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType
from typing import Any, ClassVar, Final, Protocol

from farcall.errors import NotAllowedError, SerializationError
from farcall.serialization.array_types import Pending, is_made
from farcall.serialization.pickler import Buffer, as_arguments, not_rebuilt

_IMMUTABLE: Final = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE: a class whose attributes cannot be set."""


class Guard(Protocol):
    """Decides what may be loaded."""

    def check_name(self, module: str, name: str) -> None:
        """Before anything is loaded. Raises `NotAllowedError`."""

    def check_found(self, module: str, name: str, found: object) -> None:
        """What that name led to. Raises `NotAllowedError`."""


def find(module: str, name: str, guard: Guard) -> Any:
    """What that name leads to. Raises `NotAllowedError`, or whatever importing and looking up raise."""
    guard.check_name(module, name)
    target: Any = importlib.import_module("__main__" if module == "__mp_main__" else module)
    for number, part in enumerate(name.split(".")):
        if number and not isinstance(target, type):
            raise NotAllowedError(f"`{module}.{name}` is not allowed: it leads through something that is no class")
        target = getattr(target, part)
    guard.check_found(module, name, target)
    return target


class _Changeable(Exception):
    """A name led to what a pickle could change."""


class _Unpickler(pickle.Unpickler):
    """The quick one. It cannot be told what may be given a state, so it gives up where that matters."""

    def __init__(self, payload: Buffer, buffers: Sequence[Buffer], guard: Guard) -> None:
        super().__init__(io.BytesIO(payload), buffers=buffers or None)
        self._guard = guard

    def find_class(self, module: str, name: str) -> Any:
        found = find(module, name, self._guard)
        if module.partition(".")[0] == "numpy":
            raise _Changeable
        if isinstance(found, type):
            if not found.__flags__ & _IMMUTABLE:
                raise _Changeable
        elif type(found) is not BuiltinFunctionType:
            raise _Changeable
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise NotAllowedError("a persistent id in a pickle is not allowed")


class _CarefulUnpickler(pickle._Unpickler):
    """The one in Python, whose opcodes can be looked into."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    memo: dict[int, Any]

    def __init__(self, payload: Buffer, buffers: Sequence[Buffer], guard: Guard) -> None:
        super().__init__(io.BytesIO(payload), buffers=buffers or None)
        self._guard = guard
        self._found: dict[int, Any] = {}  # by their ids; they stay alive, so that no other gets the id

    def find_class(self, module: str, name: str) -> Any:
        found = find(module, name, self._guard)
        if (module, name) == ("numpy", "dtype"):
            return Pending
        self._found[id(found)] = found
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise NotAllowedError("a persistent id in a pickle is not allowed")

    def load_build(self) -> None:
        """Gives a state to what is below it on the stack."""
        target = self.stack[-2]
        if type(target) is Pending:
            self.stack[-2:] = [made := target.made(self.stack[-1])]
            self.memo.update((place, made) for place, value in self.memo.items() if value is target)
            return
        if isinstance(target, type) or id(target) in self._found or is_made(target):
            raise NotAllowedError(f"a pickle wanted to change {target!r}, which is not allowed")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def loads_guarded(payload: Buffer, buffers: Sequence[Buffer], guard: Guard) -> Any:
    """As `loads`. Raises `NotAllowedError` for what the guard does not allow, before it is loaded."""
    if not payload:
        return None
    try:
        try:
            return _Unpickler(payload, buffers, guard).load()
        except _Changeable:
            return _CarefulUnpickler(payload, buffers, guard).load()
    except NotAllowedError:
        raise
    except Exception as error:
        raise not_rebuilt("what was sent", "here", error) from error


def loads_arguments_guarded(
    payload: Buffer, buffers: Sequence[Buffer], guard: Guard
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As `loads_arguments`. Raises as `loads_guarded`; `SerializationError` for what are no arguments."""
    if not payload:
        return (), {}
    try:
        return as_arguments(loads_guarded(payload, buffers, guard))
    except (TypeError, ValueError) as error:
        if isinstance(error, SerializationError):
            raise
        raise not_rebuilt("what was sent", "here", error) from error


class _NoNames:
    """Plain data: numbers, texts, lists. A complex number is one that has no opcode of its own."""

    def check_name(self, module: str, name: str) -> None:
        if (module, name) != ("builtins", "complex"):
            raise NotAllowedError(f"`{module}.{name}` came where there should be plain data")

    def check_found(self, module: str, name: str, found: object) -> None:
        pass


def loads_plain(payload: Buffer) -> Any:
    """A pickle of plain data. Raises `NotAllowedError` if it is more than that; whatever pickle raises."""
    return _Unpickler(payload, (), _NoNames()).load()
