"""Unpickling that asks before it loads: for workers that restrict what others may send them.

A pickle names functions and classes, and unpickling calls them. Here each name is asked about before its module is
imported or anything of it is used, and what was found is asked about once more, as a module may hold what is not its
own (`service.os.system`). Who decides is handed in (`Guard`).

Rules
- A name that leads through anything but classes is refused: from a function or an object one gets everywhere.
- Only what was named is called: not what a function gave, which may be a way to more.
- Only what the pickle itself has made is changed: not what a name led to, with the mark by which one is allowed; nor
  what a function gave, which may be the worker's own.
- A state sets no attributes of the interpreter's or of pickle's (`__class__`, `__reduce_ex__`).
- What belongs to numpy is never handed out (`arrays`), and the types of plain data get what pickle itself gives them
  (`plain_types`).
- What an edge has registered as plain data (`register_plain`) is made by what it has registered for it, unasked.
- What is refused raises `NotAllowedError`, and nothing of it has run.
- `loads_plain` is for what is plain data by its nature: there is nothing to ask about.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import pickle
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar, Final, NoReturn, Protocol

from farcall.errors import NotAllowedError, SerializationError
from farcall.serialization.arrays import ARRAY, STAND_INS, PendingArray
from farcall.serialization.pending import Pending
from farcall.serialization.pickler import Buffer, as_arguments, not_rebuilt
from farcall.serialization.plain_arrays import MARK, unpack
from farcall.serialization.plain_types import ARGUMENTS, QUICK, is_reserved, is_sound, takes_state

_IMMUTABLE: Final = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE: a class whose attributes cannot be set."""

_EXCEPTION_STATE: Final[Any] = BaseException.__setstate__


_PLAIN: Final[dict[tuple[str, str], Callable[..., Any]]] = {}
"""What edges have registered, by the module and the name that a pickle asks for."""


def register_plain(function: Callable[..., Any], checked: Callable[..., Any]) -> None:
    """Has what that function of a module makes count as plain data, which any worker takes: tensors, say.

    `checked` is what is called in its place where a worker restricts what is sent to it. It gets whatever a pickle can
    make, and has to raise for what the function must not be called with.
    """
    _PLAIN[function.__module__, function.__qualname__] = checked


class Guard(Protocol):
    """Decides what may be loaded."""

    def check_name(self, module: str, name: str) -> None:
        """Before anything is loaded. Raises `NotAllowedError`."""

    def check_found(self, module: str, name: str, found: object) -> None:
        """What that name led to. Raises `NotAllowedError`."""


def find_guarded(module: str, name: str, guard: Guard) -> Any:
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
    """The quick one. It cannot be told what may be called and changed, so it gives up where that matters."""

    def __init__(self, payload: Buffer, buffers: Sequence[Buffer], guard: Guard) -> None:
        super().__init__(io.BytesIO(payload), buffers=buffers or None)
        self._guard = guard

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in QUICK:
            if (module, name) not in _PLAIN:
                self._guard.check_name(module, name)
            raise _Changeable
        found = find_guarded(module, name, self._guard)
        if not found.__flags__ & _IMMUTABLE:
            raise _Changeable
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise NotAllowedError("a persistent id in a pickle is not allowed")


class _Memo(dict[int, Any]):
    """What a pickle comes back to. What was pending has been made by then."""

    __slots__ = ()

    def __getitem__(self, place: int) -> Any:
        value = super().__getitem__(place)
        if isinstance(value, Pending):
            if value.finished is None:
                raise pickle.UnpicklingError("something that holds itself, such as an array, is not supported")
            return value.finished
        return value


class _CarefulUnpickler(pickle._Unpickler):
    """The one in Python, whose opcodes can be looked into."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    append: Callable[[Any], None]

    def __init__(self, payload: Buffer, buffers: Sequence[Buffer], guard: Guard) -> None:
        super().__init__(io.BytesIO(payload), buffers=buffers or None)
        self.memo = _Memo()
        self._guard = guard
        # By their ids; they stay alive, so that no other gets the id.
        self._named: dict[int, tuple[Any, str]] = {}
        self._not_ours: dict[int, Any] = {}
        self._pending: list[Pending] = []

    def load(self) -> Any:
        """What was pickled. Raises `NotAllowedError`; whatever unpickling raises."""
        value = super().load()
        if any(pending.finished is None for pending in self._pending):
            raise pickle.UnpicklingError("an array, or the type of one, has no contents")
        if id(ARRAY) in self._named and not any(isinstance(pending, PendingArray) for pending in self._pending):
            raise NotAllowedError(f"it is not allowed to send {ARRAY!r} itself to this worker")
        return value

    def find_class(self, module: str, name: str) -> Any:
        found = _PLAIN.get((module, name))
        if found is None:
            found = STAND_INS.get((module, name))
            if found is None:
                found = find_guarded(module, name, self._guard)
            else:
                self._guard.check_name(module, name)
        self._named[id(found)] = found, f"{module}.{name}"
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise NotAllowedError("a persistent id in a pickle is not allowed")

    # Calls

    def load_reduce(self) -> None:
        """Calls what is below its arguments on the stack."""
        args = self.stack.pop()
        called = self.stack.pop()
        self._check_called(called, args)
        self._take(called, called(*args))

    def load_newobj(self) -> None:
        """Makes an instance whose constructor does not run."""
        args = self.stack.pop()
        self._new(self.stack.pop(), args, {})

    def load_newobj_ex(self) -> None:
        """The same, with keyword arguments."""
        kwargs, args = self.stack.pop(), self.stack.pop()
        self._new(self.stack.pop(), args, kwargs)

    def _new(self, cls: Any, args: Any, kwargs: Any) -> None:
        self._check_called(cls, (*args, *kwargs.values()))
        if not isinstance(cls, type):
            raise NotAllowedError(f"it is not allowed to make an instance of {cls!r}, which is no class")
        self._take(cls, cls.__new__(cls, *args, **kwargs))

    def _check_called(self, called: Any, args: Sequence[Any]) -> None:
        named, name = self._named.get(id(called), (None, ""))
        if named is None or named is ARRAY:
            raise NotAllowedError(f"a pickle wanted to call {name or type(called).__name__}, which is not allowed")
        is_fit = ARGUMENTS.get(name)
        if is_fit is not None and not is_fit(args):
            raise NotAllowedError(f"a pickle wanted to call `{name}` with arguments that are not allowed")

    def _take(self, called: Any, made: Any) -> None:
        """Puts what was made on the stack."""
        self.append(made)
        if isinstance(made, Pending):
            self._pending.append(made)
        elif not isinstance(called, type) or not isinstance(made, called) or isinstance(made, Enum):
            self._not_ours[id(made)] = made
        elif not is_sound(made):
            raise NotAllowedError(f"a pickle wanted to make a {type(made).__name__} about nothing; that is not allowed")

    def load_old(self) -> NoReturn:
        """Opcodes of old pickles, by which things are called in other ways, or were loaded without a question."""
        raise NotAllowedError("a pickle of an old kind is not allowed")

    # Changes

    def load_build(self) -> None:
        """Gives a state to what is below it on the stack."""
        target, state = self.stack[-2:]
        if isinstance(target, Pending):
            made = target.finish(state)
            self._not_ours[id(made)] = made
            self.stack[-2:] = [made]
            return
        self._check_changed(target)
        if not takes_state(target):
            raise NotAllowedError(f"a pickle wanted to give a state to a {type(target).__name__}, which is not allowed")
        if getattr(type(target), "__setstate__", None) in (None, _EXCEPTION_STATE):
            for part in state if type(state) is tuple and len(state) == 2 else (state,):
                _check_attributes(part)
            super().load_build()  # type: ignore[misc]
        else:
            super().load_build()  # type: ignore[misc]
            _check_attributes(getattr(target, "__dict__", None))
        if not is_sound(target):
            raise NotAllowedError(f"a pickle wanted to give a {type(target).__name__} a state that is not allowed")

    def load_append(self) -> None:
        """Adds one to a list."""
        self._check_changed(self.stack[-2])
        super().load_append()  # type: ignore[misc]

    def load_setitem(self) -> None:
        """Adds one to a dict."""
        self._check_changed(self.stack[-3])
        super().load_setitem()  # type: ignore[misc]

    def load_appends(self) -> None:
        """Adds all above the mark to a list."""
        self._check_changed(self.metastack[-1][-1])
        super().load_appends()  # type: ignore[misc]

    def load_setitems(self) -> None:
        """Adds all above the mark to a dict."""
        self._check_changed(self.metastack[-1][-1])
        super().load_setitems()  # type: ignore[misc]

    def load_additems(self) -> None:
        """Adds all above the mark to a set."""
        self._check_changed(self.metastack[-1][-1])
        super().load_additems()  # type: ignore[misc]

    def _check_changed(self, target: Any) -> None:
        if isinstance(target, (type, Pending)) or id(target) in self._named or id(target) in self._not_ours:
            what = target.__qualname__ if isinstance(target, type) else f"a {type(target).__name__}"
            raise NotAllowedError(f"a pickle wanted to change {what} that it has not made, which is not allowed")

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.APPEND[0]] = load_append
    dispatch[pickle.APPENDS[0]] = load_appends
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems
    for _code in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        dispatch[_code[0]] = load_old


def _check_attributes(attributes: Any) -> None:
    """Raises `NotAllowedError` if there are more than a program's own among them, of which pickle would obey some."""
    if not attributes:
        return
    if type(attributes) is not dict:
        raise NotAllowedError(f"a pickle with a {type(attributes).__name__} for attributes is not allowed")
    for name in attributes:
        if type(name) is not str or is_reserved(name):
            raise NotAllowedError(f"a pickle wanted to set the attribute {str(name)[:100]!r}, which is not allowed")


def loads_guarded(payload: Buffer, buffers: Sequence[Buffer], guard: Guard) -> Any:
    """As `loads`. Raises `NotAllowedError` for what the guard does not allow, before it is loaded."""
    if not payload:
        return None
    try:
        if payload[0] == MARK:
            guard.check_name("numpy", "ndarray")
            return unpack(payload, buffers)
        try:
            if copyreg._extension_cache:  # type: ignore[attr-defined]  # the quick one hands out what is in it unasked
                raise _Changeable
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
