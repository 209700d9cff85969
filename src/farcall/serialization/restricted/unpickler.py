"""The restricted unpickler, for workers with an allow-list: it checks a name before it loads what the name stands for.

A pickle names functions and classes, and unpickling calls them. Here a `Guard` is asked about each name before its
module is imported. The guard is asked again about the object that was found, because a module can be used to reach
objects of other modules (`service.os.system`).

Theory of operation: there are two unpicklers. Most pickles contain no names, or a few harmless ones, and are left to
pickle's C code (`_FastUnpickler`). When it finds another name, it gives up, and the pickle is read again from the start
by a subclass of pickle's Python unpickler (`_CheckingUnpickler`), whose opcodes can be overridden. It keeps track of
where every object came from: a name, the pickle itself, or a function.

Rules
- A dotted name may lead only through classes, because functions and other objects lead everywhere.
- The opcodes are checked first (`opcodes`): a pickle that is too deep, or would take all memory or time, is refused.
- Only objects found by name are called, never what a function returned. The opcodes that add to a value or set its
  state call methods of its class, never attributes of the value.
- Only objects that the pickle has created are changed. Objects found by name are not, nor what a function returned, nor
  an instance that a class shares: these may be the worker's own.
- Objects that the interpreter frees by nested C calls (deques, slices, exceptions in exceptions, arrays of objects) are
  nested at most `_MAX_FREED_DEPTH` deep. So that the depth is known, such an object is not changed any more once it is
  inside another one.
- The arguments of calls that create plain data are limited to little more than was sent. Otherwise a pickle could have
  one text copied many times.
- A state sets no attributes of the interpreter or of pickle (`__class__`, `__reduce_ex__`).
- Exceptions must be safe to inspect and print (`exceptions`).
- numpy's own functions are never handed out (`arrays`), and plain types get only the arguments that pickle itself would
  give them (`plain_types`).
- Types that another package has registered as plain data (`register_plain`) need no guard: the registered function
  checks the arguments.
- What is refused raises `NotAllowedError`, and nothing of it has run.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from types import BuiltinFunctionType
from typing import Any, ClassVar, Final, Protocol

from farcall.errors import NotAllowedError, SerializationError
from farcall.serialization.arrays import ARRAYS_MARK, unpack_arrays
from farcall.serialization.payload import Buffer, as_arguments, not_rebuilt_error
from farcall.serialization.restricted.arrays import NDARRAY, STAND_INS, Pending, PendingArray, objects_in, scalar
from farcall.serialization.restricted.exceptions import are_printable, hides_method, is_dropped, is_sound, slot_values
from farcall.serialization.restricted.opcodes import check_opcodes
from farcall.serialization.restricted.plain_types import (
    FAST_TYPES,
    MAX_FAST_BYTES,
    is_reserved,
    sent_size,
    takes_arguments,
    takes_state,
)

_IMMUTABLE: Final = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE: the flag of a class whose attributes cannot be set."""

_EXCEPTION_SETSTATE: Final[Any] = BaseException.__setstate__

_MAX_FREED_DEPTH: Final = 30
"""How deep objects may be nested that the interpreter frees by nested C calls. Lists and tuples break off a chain of
such calls only after fifty."""

_MAX_COPIED: Final = 1 << 24
"""How many bytes and elements calls may get as arguments, in addition to eight times what was sent."""

_FRESH_MODULES: Final = frozenset({"builtins", "collections"})
"""The modules of types whose `__new__` always returns a new object, or one that cannot be changed."""


def _call(called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Returns the result of `called(*args, **kwargs)`, and how many references, weak ones included, there are to it.

    Raises what the call raises.
    """
    made = called(*args, **kwargs)
    return made, sys.getrefcount(made) + weakref.getweakrefcount(made)


_UNSHARED_REFERENCES: Final = _call(object, (), {})[1]
"""The number of references that `_call` counts for a new object. Measured, because it depends on the Python version."""


_COPYING_MODULES: Final = (
    {"builtins", "collections", "decimal", "fractions", "datetime", "uuid", "pathlib", "pathlib._local"}
    | {stand_in.__module__ for stand_in in STAND_INS.values()}
    | {"farcall.serialization.buffers"}
)
"""The modules of types and functions that create plain data, and copy their arguments for that."""

_REGISTERED: Final[dict[tuple[str, str], Callable[..., Any]]] = {}
"""The `checked` functions of `register_plain`, by the module and the name of the function that a pickle asks for."""


def register_plain(function: Callable[..., Any], checked: Callable[..., Any]) -> None:
    """Declares that a function creates plain data, such as tensors, which workers with an allow-list accept as well.

    A second call for the same function replaces `checked`. Neither argument is checked.

    Args:
        function: A function of a module. Pickles contain its name.
        checked: Called instead of `function` on workers with an allow-list. An attacker chooses the arguments:
            `checked` must raise an exception for all that are not safe. The pickle cannot change the object that it
            returns.
    """
    _REGISTERED[function.__module__, function.__qualname__] = checked
    _COPYING_MODULES.add(checked.__module__)


class Guard(Protocol):
    """Decides which functions and classes a pickle from another worker may use. `security.allowed.AllowList` is one.

    `check_name` is asked before a name is looked up, and `check_found` when its object was found.
    """

    def check_name(self, module: str, name: str) -> None:
        """Raises `NotAllowedError` if a pickle may not use that name; returns None if it may.

        Called before anything is imported, so the name need not exist.

        Args:
            module: The name of the module.
            name: The dotted name in the module.
        """

    def check_found(self, module: str, name: str, found: object) -> None:
        """Raises `NotAllowedError` if a pickle may not use the object that was found; returns None if it may.

        Called after `check_name` has allowed the name, because a module can lead to objects of other modules.

        Args:
            module: The name of the module.
            name: The dotted name in the module.
            found: The object with that name.
        """


def find_allowed(module: str, name: str, guard: Guard) -> Any:
    """Returns the object with a dotted name in a module, after the guard has allowed the name and the object.

    Args:
        module: The name of the module. It is imported if necessary. `__mp_main__`, the script in a child process of
            multiprocessing, means `__main__`.
        name: The dotted name in the module.
        guard: Decides whether the name and the object may be used.

    Raises:
        NotAllowedError: The guard does not allow it, or the name leads through something that is not a class.
        Exception: What importing the module or looking up the name raises, such as `ImportError` or `AttributeError`.
    """
    guard.check_name(module, name)
    target: Any = importlib.import_module("__main__" if module == "__mp_main__" else module)
    for number, part in enumerate(name.split(".")):
        if number and not isinstance(target, type):
            raise NotAllowedError(f"`{module}.{name}` is not allowed: it leads through an object that is not a class")
        target = getattr(target, part)
    guard.check_found(module, name, target)
    return target


class _NeedsChecking(Exception):
    """Raised for a pickle with a name that `_FastUnpickler` cannot handle safely: `_CheckingUnpickler` must read it."""


class _FastUnpickler(pickle.Unpickler):
    """Pickle's C unpickler, for pickles without names, or with names of `FAST_TYPES` only. Call `load` once.

    Its opcodes cannot be overridden, so it cannot control what is called or changed. For any other name that the guard
    allows, `load` raises `_NeedsChecking`. For a name that the guard refuses, it raises `NotAllowedError`.

    Args:
        payload: The pickle, whose opcodes have been checked.
        buffers: The buffers that came with it, in order; may be empty.
        guard: Decides which names may be used.
    """

    def __init__(self, payload: Buffer, buffers: Sequence[Buffer], guard: Guard) -> None:
        super().__init__(io.BytesIO(payload), buffers=buffers or None)
        self._guard = guard
        self._is_short = len(payload) <= MAX_FAST_BYTES

    def find_class(self, module: str, name: str) -> Any:
        """Returns the type of that name if it is a harmless one (in `FAST_TYPES`) and the pickle is short.

        A pickle is short if it has at most `MAX_FAST_BYTES` bytes. Raises `NotAllowedError` if the guard refuses the
        name, and `_NeedsChecking` in all other cases.
        """
        if f"{module}.{name}" not in FAST_TYPES or not self._is_short:
            if (module, name) not in _REGISTERED:
                self._guard.check_name(module, name)
            raise _NeedsChecking
        found = find_allowed(module, name, self._guard)
        if not found.__flags__ & _IMMUTABLE:
            raise _NeedsChecking
        return found

    def persistent_load(self, pid: Any) -> Any:
        """Raises `NotAllowedError`, always: farcall's pickles have no persistent ids."""
        raise NotAllowedError("a pickle with a persistent id is not allowed")


class _Memo(dict[int, Any]):
    """The memo of an unpickler, from indexes to values. It returns the finished value for a pending one.

    A value is pending (a `Pending`) until its state arrives in the pickle.
    """

    __slots__ = ()

    def __getitem__(self, index: int) -> Any:
        """Returns the value with that index; if the entry is a `Pending`, the value that was created from its state.

        Raises `UnpicklingError` if the state of a `Pending` has not arrived yet, and `KeyError` if there is no such
        index.
        """
        value = super().__getitem__(index)
        if isinstance(value, Pending):
            if value.finished is None:
                raise pickle.UnpicklingError("an array that contains itself is not supported")
            return value.finished
        return value


class _CheckingUnpickler(pickle._Unpickler):
    """Pickle's Python unpickler, with checks in the opcodes that call or change something. Call `load` once.

    The methods named `load_...` run one opcode each, on the objects at the end of `stack`. The attributes that are
    declared here are those of pickle's own unpickler; in `dispatch`, the checked methods replace those of pickle.

    Args:
        payload: The pickle, whose opcodes have been checked.
        buffers: The buffers that came with it, in order; may be empty.
        guard: Decides which names may be used.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, payload: Buffer, buffers: Sequence[Buffer], guard: Guard) -> None:
        super().__init__(io.BytesIO(payload), buffers=buffers or None)
        self.memo = _Memo()
        self._guard = guard
        # These dicts are by id. They contain the objects as well, so that an id stays the id of the same object.
        self._named: dict[int, tuple[Any, str]] = {}  # objects found by name, and their names
        self._frozen: dict[int, Any] = {}  # objects that the pickle must not change
        self._freed: dict[int, tuple[int, Any]] = {}  # objects freed by nested C calls, and their depths
        self._pending: list[Pending] = []
        self._errors: list[BaseException] = []
        self._may_copy = _MAX_COPIED + 8 * (len(payload) + sum(memoryview(buffer).nbytes for buffer in buffers))

    def load(self) -> Any:
        """Returns the value of the pickle.

        Raises:
            NotAllowedError: The pickle does something that is not allowed.
            Exception: What unpickling raises for an invalid pickle, such as `pickle.UnpicklingError` or `EOFError`, or
                for a name that cannot be found.
        """
        value = super().load()
        if any(pending.finished is None for pending in self._pending):
            raise pickle.UnpicklingError("an array, or the type of one, has no contents")
        if id(NDARRAY) in self._named and not any(isinstance(pending, PendingArray) for pending in self._pending):
            raise NotAllowedError(f"a pickle with {NDARRAY!r} itself, and no array, is not allowed")
        # At the end, because the contents of an exception may have changed since it was created.
        if not are_printable(self._errors) or not all(map(is_sound, self._errors)):
            raise NotAllowedError("a pickle with an exception that cannot be printed safely is not allowed")
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Returns the object with that name. For some functions, returns a checked function that takes their place.

        These are numpy's functions in pickles of arrays, and functions registered by `register_plain`. Raises
        `NotAllowedError` if the guard does not allow the name. Raises what importing the module or looking up the name
        raises, such as `ImportError` or `AttributeError`.
        """
        found = _REGISTERED.get((module, name))
        if found is None:
            found = STAND_INS.get((module, name))
            if found is None:
                found = find_allowed(module, name, self._guard)
            else:
                self._guard.check_name(module, name)
        self._named[id(found)] = found, f"{module}.{name}"
        return found

    def persistent_load(self, pid: Any) -> Any:
        """Raises `NotAllowedError`, always: farcall's pickles have no persistent ids."""
        raise NotAllowedError("a pickle with a persistent id is not allowed")

    # Calls

    def load_reduce(self) -> None:
        """REDUCE: calls a function or class, and pushes the result.

        Takes the tuple of arguments from the end of the stack, and before it the object to call. Raises
        `NotAllowedError` if the pickle may not call it with these arguments, and what the call raises.
        """
        args = self.stack.pop()
        called = self.stack.pop()
        self._check_call(called, args, {})
        self._push_result(called, called, args, {})

    def load_newobj(self) -> None:
        """NEWOBJ: creates an instance with `__new__`, without `__init__`, and pushes it.

        The class and the tuple of arguments are at the end of the stack. Raises `NotAllowedError` if the pickle may not
        create the instance with these arguments, and what `__new__` raises.
        """
        args = self.stack.pop()
        self._new(self.stack.pop(), args, {})

    def load_newobj_ex(self) -> None:
        """NEWOBJ_EX: creates an instance with `__new__`, without `__init__`, and pushes it; with keyword arguments.

        The class, the tuple of arguments and the dict of keyword arguments are at the end of the stack. Raises
        `NotAllowedError` if the pickle may not create the instance with these arguments, and what `__new__` raises.
        """
        kwargs, args = self.stack.pop(), self.stack.pop()
        self._new(self.stack.pop(), args, kwargs)

    def _new(self, cls: Any, args: Any, kwargs: Any) -> None:
        """Creates an instance of `cls` with its `__new__`, and pushes it on the stack.

        Raises `NotAllowedError` if `cls` was not found by name, is not a class, or may not get these arguments, and
        `UnpicklingError` if `args` is not a tuple or `kwargs` not a dict.
        """
        self._check_call(cls, args, kwargs)
        if not isinstance(cls, type):
            raise NotAllowedError(f"a pickle tries to create an instance of {cls!r}, which is not allowed: no class")
        self._push_result(cls, cls.__new__, (cls, *args), kwargs)

    def _check_call(self, called: Any, args: Any, kwargs: Any) -> None:
        """Raises `NotAllowedError` if the pickle may not call `called` with these arguments; else returns None.

        It may not if `called` was not found by name, if `called` does not accept these arguments from a pickle, or if
        the pickle has had too much copied. Counts what the call will copy of the positional arguments. Raises
        `UnpicklingError` if `args` is not a tuple or `kwargs` not a dict.
        """
        named, name = self._named.get(id(called), (None, ""))
        if named is None or named is NDARRAY:
            raise NotAllowedError(f"a pickle tries to call {name or type(called).__name__}, which is not allowed")
        if type(args) is not tuple or type(kwargs) is not dict:
            raise pickle.UnpicklingError("a pickle calls something with invalid arguments")
        if not takes_arguments(called, (*args, *kwargs.values())):
            raise NotAllowedError(f"a pickle tries to call `{name}` with arguments that are not allowed")
        if getattr(called, "__module__", None) in _COPYING_MODULES:
            self._count_copied(args)

    def _count_copied(self, given: Sequence[Any]) -> None:
        """Counts the bytes and elements of the arguments `given` that a call will copy.

        Raises `NotAllowedError` when the pickle has had more copied than the sum of `_MAX_COPIED` and eight times the
        bytes that were sent.
        """
        self._may_copy -= sum(map(sent_size, given))
        if self._may_copy < 0:
            raise NotAllowedError("a pickle that copies the same values again and again is not allowed")

    def _push_result(self, named: Any, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls `make`, pushes the result on the stack, and records whether the pickle may change it.

        Args:
            named: The object that was found by name: the function, or the class whose `__new__` is called.
            make: What is called.
            args: Its positional arguments, already checked.
            kwargs: Its keyword arguments, already checked.

        Raises:
            NotAllowedError: The result is an exception that is not safe to inspect, or is nested too deeply.
            Exception: What the call raises.
        """
        made, references = _call(make, args, kwargs)
        self.append(made)
        if isinstance(made, Pending):
            self._pending.append(made)
        elif isinstance(made, BaseException):
            self._errors.append(made)
            if not is_sound(made):
                raise NotAllowedError(
                    f"a pickle tries to create a {type(made).__name__} with contents that are not allowed"
                )
        if not _is_new(named, made, references):
            self._frozen[id(made)] = made
        if isinstance(made, slice):
            self._record_contents(made, (made.start, made.stop, made.step))
        elif isinstance(made, deque):
            self._record_contents(made, tuple(made))
        elif isinstance(made, BaseException):
            self._record_contents(made, slot_values(made))
        elif named is scalar:
            self._record_contents(made, args)  # the scalar may be a record with objects

    # Changes

    def load_build(self) -> None:
        """BUILD: takes a state from the end of the stack, and sets it on the object before it.

        An array or a dtype is created from its state, and replaces that object on the stack. Raises `NotAllowedError`
        if the object must not be changed or must not get this state, and what the class's own `__setstate__` raises.
        """
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Pending):
            if type(state) is tuple:
                self._count_copied(state)
            made = target.finish(state)
            self._frozen[id(made)] = made
            if isinstance(target, PendingArray):
                self._record_contents(made, objects_in(made))
            self.stack[-1] = made
            return
        self._check_change(target)
        if not takes_state(target, state):
            raise NotAllowedError(f"a pickle tries to set a state of a {type(target).__name__} that is not allowed")
        set_state = getattr(type(target), "__setstate__", None)
        if set_state is _EXCEPTION_SETSTATE:
            _set_exception_state(target, state)
            self._record_contents(target, slot_values(target))
        elif set_state is not None:
            set_state(target, state)
            _check_attributes(getattr(target, "__dict__", None))
        else:
            attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
            _check_attributes(attributes)
            _check_attributes(slots)
            if attributes:
                target.__dict__.update(attributes)
            for name, value in (slots or {}).items():
                setattr(target, name, value)
        if not is_sound(target):
            raise NotAllowedError(f"a pickle tries to set a state of a {type(target).__name__} that is not allowed")

    def load_append(self) -> None:
        """APPEND: takes the item at the end of the stack, and adds it to the list or similar object before it.

        Raises `NotAllowedError` if the pickle must not change that object.
        """
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        """APPENDS: takes all items after the last mark, and adds them to the list or similar object before the mark.

        There may be no items. Raises `NotAllowedError` if the pickle must not change that object.
        """
        self._extend(self.pop_mark())

    def load_additems(self) -> None:
        """ADDITEMS: takes all items after the last mark, and adds them to the set or similar object before the mark.

        There may be no items. Raises `NotAllowedError` if the pickle must not change that object.
        """
        items = self.pop_mark()
        target = self.stack[-1]
        self._check_change(target)
        if isinstance(target, set):
            type(target).update(target, items)
        else:
            add = type(target).add
            for item in items:
                add(target, item)

    def load_setitem(self) -> None:
        """SETITEM: takes a key and a value from the end of the stack, and sets the item in the dict before them.

        Any object with `__setitem__` may take the place of the dict. Raises `NotAllowedError` if the pickle must not
        change that object.
        """
        value, key = self.stack.pop(), self.stack.pop()
        self._check_change(self.stack[-1])
        self.stack[-1][key] = value

    def load_setitems(self) -> None:
        """SETITEMS: takes all keys and values after the last mark, and sets these items in the dict before the mark.

        Any object with `__setitem__` may take the place of the dict. There may be no items. Raises `NotAllowedError` if
        the pickle must not change that object.
        """
        items = self.pop_mark()
        target = self.stack[-1]
        self._check_change(target)
        for index in range(0, len(items), 2):
            target[items[index]] = items[index + 1]

    def _extend(self, items: list[Any]) -> None:
        """Adds items, which may be none, to the list or similar object at the end of the stack.

        Raises `NotAllowedError` if the pickle must not change that object, and `AttributeError` if it has neither
        `extend` nor `append`.
        """
        target = self.stack[-1]
        self._check_change(target)
        if isinstance(target, deque):
            self._record_contents(target, items)
        extend = getattr(type(target), "extend", None)
        if extend is not None:
            extend(target, items)
            return
        append = type(target).append
        for item in items:
            append(target, item)

    def _record_contents(self, target: Any, values: Sequence[Any]) -> None:
        """Records that `values` are inside `target`, which the interpreter frees by nested C calls (such as a deque).

        The depth of `target` is 1 more than that of the deepest value of this sort in it; without such values it is 1.
        The pickle must not change these values any more, because that could make them deeper later.

        Raises `NotAllowedError` if `target` is deeper than `_MAX_FREED_DEPTH` now.
        """
        depth, _ = self._freed.get(id(target), (1, None))
        for value in values:
            inner, found = self._freed.get(id(value), (0, None))
            if found is not None:
                self._frozen[id(value)] = value
                depth = max(depth, inner + 1)
        if depth > _MAX_FREED_DEPTH:
            raise NotAllowedError(
                f"deques, slices, exceptions or arrays of objects are nested more than {_MAX_FREED_DEPTH} deep, which "
                "is not allowed; send them flattened"
            )
        self._freed[id(target)] = depth, target

    def _check_change(self, target: Any) -> None:
        """Returns None if the pickle may change `target`, because it has created it; else raises `NotAllowedError`.

        The pickle must not change classes, objects found by name, arrays, dtypes, and results of calls that may not be
        new objects.
        """
        if isinstance(target, (type, Pending)) or id(target) in self._named or id(target) in self._frozen:
            what = target.__qualname__ if isinstance(target, type) else f"a {type(target).__name__}"
            raise NotAllowedError(f"a pickle tries to change {what} that it has not created, which is not allowed")

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.APPEND[0]] = load_append
    dispatch[pickle.APPENDS[0]] = load_appends
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems


def _is_new(named: Any, made: Any, references: int) -> bool:
    """Returns True if a call has created a new object, which the pickle may change; else False.

    Returns False for what a function returned, for an `Enum`, and for an instance that its class may share.

    Args:
        named: The function or class that was called.
        made: The result of the call.
        references: The number of references to the result, as `_call` counts them.
    """
    if not isinstance(named, type) or named not in type(made).__mro__ or isinstance(made, Enum):
        return False
    if references <= _UNSHARED_REFERENCES:
        return True
    # Something else refers to the object: the class returns the same instance again, or keeps a list of its instances.
    # If neither a metaclass nor a `__new__` of the user is involved, it must be the latter, and the object is new.
    new: Any = named.__new__
    return (
        type(named).__call__ is type.__call__
        and type(new) is BuiltinFunctionType
        and new.__self__.__module__ in _FRESH_MODULES
    )


def _set_exception_state(error: BaseException, state: Any) -> None:
    """Sets the attributes of an exception from the dict `state`; None and an empty dict set nothing.

    Skips attributes that the interpreter would use (`is_dropped`). Raises `NotAllowedError` if an attribute is named
    `__like_this__` or hides a method, or `state` is not a dict.
    """
    _check_attributes(state)
    for name, value in (state or {}).items():
        if is_dropped(error, name, trusted=False):
            continue
        if hides_method(error, name):
            raise NotAllowedError(
                f"a pickle tries to replace the method {name!r} of an exception, which is not allowed"
            )
        setattr(error, name, value)


def _check_attributes(attributes: Any) -> None:
    """Raises `NotAllowedError` if `attributes` is not a dict from str to values, or has a name `__like_this__`.

    Pickle would obey such an attribute. None, an empty dict and other empty values pass.
    """
    if not attributes:
        return
    if type(attributes) is not dict:
        raise NotAllowedError(
            f"a pickle with a {type(attributes).__name__} instead of a dict of attributes is not allowed"
        )
    for name in attributes:
        if type(name) is not str:
            raise NotAllowedError(f"a pickle with a {type(name).__name__} as the name of an attribute is not allowed")
        if is_reserved(name):
            raise NotAllowedError(f"a pickle tries to set the attribute {name[:100]!r}, which is not allowed")


def loads_restricted(payload: Buffer, buffers: Sequence[Buffer], guard: Guard) -> Any:
    """Returns the value of a payload from an untrusted sender, and runs nothing that is not allowed.

    Args:
        payload: The payload; an empty one means None.
        buffers: The buffers that came with it, in order; empty if there are none. Large arrays use the memory of the
            buffers, without a copy.
        guard: Decides which functions and classes may be used.

    Raises:
        NotAllowedError: The payload uses something that the guard does not allow, is nested too deeply or too costly,
            or tries to change or call what it must not.
        SerializationError: The value cannot be rebuilt here, for example because the pickle is invalid.
    """
    if not payload:
        return None
    if type(payload) is not bytes:
        payload = bytes(payload)  # a copy, so that the sender cannot change shared memory after the check
    try:
        if payload[0] == ARRAYS_MARK:
            guard.check_name("numpy", "ndarray")
            return unpack_arrays(payload, buffers)
        check_opcodes(payload)
        try:
            return _FastUnpickler(payload, buffers, guard).load()
        except _NeedsChecking:
            return _CheckingUnpickler(payload, buffers, guard).load()
    except NotAllowedError:
        raise
    except Exception as error:
        raise not_rebuilt_error("the message", "here", error) from error


def loads_restricted_arguments(
    payload: Buffer, buffers: Sequence[Buffer], guard: Guard
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and the keyword arguments of a call from an untrusted sender.

    Args:
        payload: The payload; an empty one means no arguments.
        buffers: The buffers that came with it, in order; empty if there are none. Large arrays use the memory of the
            buffers, without a copy.
        guard: Decides which functions and classes may be used.

    Raises:
        NotAllowedError: The payload uses something that the guard does not allow, is nested too deeply or too costly,
            or tries to change or call what it must not.
        SerializationError: The arguments cannot be rebuilt here, or the payload does not contain arguments.
    """
    if not payload:
        return (), {}
    try:
        return as_arguments(loads_restricted(payload, buffers, guard))
    except (TypeError, ValueError) as error:
        if isinstance(error, SerializationError):
            raise
        raise not_rebuilt_error("the message", "here", error) from error


class _NoNames:
    """A guard, which decides about names in pickles, that allows only `complex`: complex numbers have no opcode."""

    def check_name(self, module: str, name: str) -> None:
        """Raises `NotAllowedError` for every name but `complex` of the module `builtins`."""
        if (module, name) != ("builtins", "complex"):
            raise NotAllowedError(f"a pickle has `{module}.{name}` where only plain data is allowed")

    def check_found(self, module: str, name: str, found: object) -> None:
        """Does nothing: `check_name` has allowed the name, and what was found is allowed."""


def loads_plain(payload: Buffer) -> Any:
    """Returns the value of a pickle that must contain only numbers, texts, bytes and builtin collections of them.

    Raises:
        NotAllowedError: The pickle names a function or class, or is too deep or too costly.
        Exception: What pickle raises for an invalid pickle, such as `pickle.UnpicklingError`, or `EOFError` for an
            empty one.
    """
    payload = bytes(payload)  # a copy, so that the sender cannot change shared memory after the check
    check_opcodes(payload)
    return _FastUnpickler(payload, (), _NoNames()).load()
