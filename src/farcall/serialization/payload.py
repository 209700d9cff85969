"""Serializes the values, arguments and results of calls, and rebuilds them.

Serializing a value gives a *payload*, which is bytes, and a list of buffers. The buffers are sent beside the payload.
They are views of the caller's memory, so large data is not copied here. Pickle's C code does most of the work. What
pickle cannot pickle (lambdas, closures, local classes) is pickled a second time by cloudpickle, by value.

Rules
- An empty payload means None, or a call without arguments. These are the most frequent payloads, and cost nothing.
- A buffer of less than `OUT_OF_BAND_MIN_BYTES` bytes stays in the payload, because copying it is cheaper than sending
  one more piece.
- Plain memory (`bytes`, `memoryview` ...) that is itself an argument or a result is sent as a buffer (`buffers`).
- Arguments that are all plain arrays, and a result that is one, are sent without pickle (`arrays`).
- Functions and classes of a script's `__main__` are sent by name, like those of any module: all workers run the same
  script, and a function must see the globals of the worker that runs it. An interactive `__main__` (a notebook, a
  prompt, `python -c`) exists in one process only, so its functions and classes are sent by value.
- A child that `multiprocessing` has spawned calls the script `__mp_main__`. Both names mean the receiver's script.
- A value that cannot be pickled raises `SerializationError`, which names the argument and the part of it that is to
  blame. That part is searched for after pickle has failed, so that the search does not slow down other calls.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pickle import dumps as _pickle_dumps
from pickle import loads as _pickle_loads
from typing import Any, Final, TypeAlias

from farcall.errors import SerializationError, UsageError
from farcall.serialization.arrays import (
    ARRAYS,
    ARRAYS_MARK,
    OUT_OF_BAND_MIN_BYTES,
    detect_numpy,
    pack_arguments,
    pack_array,
    unpack_arrays,
)
from farcall.serialization.buffers import BUFFER_MIN_BYTES, BUFFER_TYPES, has_buffer, wrap_buffers
from farcall.serialization.callables import DEFINE_IN_SCRIPT_ADVICE, callable_name
from farcall.serialization.registry import REDUCERS, dumps_reduced
from farcall.serialization.unpicklable import find_unpicklable, type_name

MAX_OUT_OF_BAND: Final = 0xFFFF
"""The largest number of buffers in a message."""

Pickled: TypeAlias = tuple[bytes, list[memoryview]]
"""A payload, and the buffers that are sent beside it, in order. The buffers are views of the value's own memory."""

Buffer: TypeAlias = bytes | bytearray | memoryview
"""A payload or buffer as it is received."""

ATOMS: Final = frozenset({int, float, complex, bool, str})
"""The types of values that contain no other values, no buffers and no references, and are rebuilt without user code."""

_NO_BUFFERS: Final[list[memoryview]] = []
"""Shared by all payloads without buffers; never changed."""

_modules = sys.modules


class _OutOfBand(list[memoryview]):
    """The list of the large buffers of one value, and pickle's callback that fills it. A new one is empty.

    One object for both saves creating a closure for each value.
    """

    __slots__ = ()

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """Returns True if pickle must keep the buffer in the payload: it has less than `OUT_OF_BAND_MIN_BYTES` bytes.

        Otherwise adds the buffer to the list and returns False. Raises `OverflowError` if the list has
        `MAX_OUT_OF_BAND` buffers already. Pickle calls this only for contiguous buffers.
        """
        if not ARRAYS:
            detect_numpy()
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND_MIN_BYTES:
            return True
        if len(self) == MAX_OUT_OF_BAND:
            raise OverflowError(f"the value has more than {MAX_OUT_OF_BAND} large buffers; send it in parts")
        self.append(view)
        return False


def dumps(value: Any) -> Pickled:
    """Returns the payload and the large buffers of a value; an empty payload and no buffers for None.

    The buffers are views of the value's own memory. The list is empty if there are none.

    Raises:
        SerializationError: The value cannot be pickled. The message names the part that is to blame.
    """
    if value is None:
        return b"", []
    buffers = _OutOfBand()
    try:
        return _pickle(value, buffers), buffers
    except Exception as error:
        raise _unpicklable_error("the value", "value", value, error, "Send plain data instead") from error


def dumps_inline(value: Any) -> bytes:
    """Returns the pickle of a value with all its buffers inside; None is pickled as any other value.

    Raises:
        Exception: What pickle raises for a value that cannot be pickled, such as `TypeError` or `pickle.PicklingError`.
    """
    return _pickle(value, None)


def dumps_atom(value: Any) -> bytes:
    """Returns the payload of a value whose type is in `ATOMS` (int, float, complex, bool, str); faster than `dumps`.

    The type is not checked. `loads` and `loads_atom` rebuild the value.
    """
    return _pickle_dumps(value, 5)


loads_atom: Final = _pickle_loads
"""`loads_atom(payload)` returns the value that `dumps_atom` was given. It is pickle's own `loads`, with its errors."""


def loads(payload: Buffer, buffers: Sequence[Buffer] = ()) -> Any:
    """Returns the value of a payload. Unpickles whatever the payload contains, so use it for trusted senders only.

    Args:
        payload: The payload; an empty one means None.
        buffers: The buffers that came with it, in order; empty if there are none. Large arrays use the memory of the
            buffers, without a copy.

    Raises:
        SerializationError: The value cannot be rebuilt here, for example because a class is missing.
    """
    if not payload:
        return None
    try:
        if payload[0] == ARRAYS_MARK:
            return unpack_arrays(payload, buffers)
        return _pickle_loads(payload, buffers=buffers) if buffers else _pickle_loads(payload)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "__mp_main__" not in _modules:
            # The sender is a child that multiprocessing has spawned from this same script, and calls the script
            # __mp_main__. With that name in sys.modules, later payloads are loaded without this detour.
            _modules["__mp_main__"] = _modules["__main__"]
            return loads(payload, buffers)
        raise not_rebuilt_error("the message", "here", error) from error


def not_rebuilt_error(what: str, where: str, reason: BaseException | None) -> SerializationError:
    """Returns the error for something that cannot be rebuilt, with advice. Does not raise it.

    Args:
        what: What cannot be rebuilt, such as "the result of `add`".
        where: Where it cannot be rebuilt, such as "here" or "on worker 'b'".
        reason: The exception that was raised while it was rebuilt. Its text is in the message. None if it is not known,
            for which the message has "NoneType: None".
    """
    if isinstance(reason, SerializationError):  # its text contains advice
        return SerializationError(f"{what} cannot be rebuilt {where}: {reason}")
    # If a module lacks a class, pickle says so only in the text of the AttributeError, which has the repr of the
    # module or, since Python 3.14, its name.
    script = _modules["__main__"]
    named = (repr(script), f"module {script.__name__!r}")
    missing_in_script = isinstance(reason, AttributeError) and any(name in str(reason) for name in named)
    advice = DEFINE_IN_SCRIPT_ADVICE if missing_in_script else "is the same code installed on both workers?"
    return SerializationError(f"{what} cannot be rebuilt {where} ({type(reason).__name__}: {reason}); {advice}")


def dumps_arguments(
    function: Callable[..., Any] | str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    worker: str = "",
    by_value: bool = False,
) -> Pickled:
    """Returns the payload and the buffers of the arguments of a call; an empty payload for a call without arguments.

    The buffers are views of the arguments' own memory. The list is empty if there are none.

    Args:
        function: The function or its name. It is used for error messages only, unless `by_value` is true.
        args: The positional arguments; may be empty.
        kwargs: The keyword arguments; None for none.
        worker: The name of the callee, for error messages; empty if unknown.
        by_value: Whether to send the function itself, as the first argument. It is pickled together with the arguments,
            so that objects that both contain stay shared.

    Raises:
        SerializationError: An argument cannot be pickled. The message names it.
        UsageError: `args` is not a list of arguments (a number, a str, a set, a dict), or `kwargs` is not a mapping.
            Values of a wrong type that are empty or 0 count as no arguments, except for `args` with `by_value`.
    """
    if by_value:
        sent: Any = (function, *_as_tuple(args))
    elif args:
        sent = args if type(args) is tuple else _as_tuple(args)
    elif kwargs:
        sent = ()
    else:
        return b"", []
    if kwargs:
        named = kwargs if type(kwargs) is dict else _as_dict(kwargs)
        sent = wrap_buffers([sent, named]) if has_buffer(sent) or has_buffer(named.values()) else [sent, named]
    elif type(sent[0]) in ARRAYS and (packed := pack_arguments(sent)) is not None:
        return packed
    elif has_buffer(sent):
        sent, _ = wrap_buffers([sent, {}])
    buffers = _OutOfBand()
    try:
        return _pickle(sent, buffers), buffers
    except Exception as error:
        raise _unpicklable_argument_error(function, args, kwargs or {}, worker, by_value, error) from error


def loads_arguments(payload: Buffer, buffers: Sequence[Buffer] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call. Unpickles whatever the payload contains, so use it for trusted senders only.

    Args:
        payload: What `dumps_arguments` returned; an empty one means no arguments.
        buffers: The buffers that came with it, in order; empty if there are none. Large arrays use the memory of the
            buffers, without a copy.

    Returns:
        The positional and the keyword arguments. If the function was sent by value, it is the first positional one.

    Raises:
        SerializationError: An argument cannot be rebuilt here.
        TypeError, ValueError: The payload was rebuilt, but does not contain arguments.
    """
    if not payload:
        return (), {}
    sent = loads(payload, buffers)
    if type(sent) is tuple:
        return sent, {}
    return as_arguments(sent)


def as_arguments(sent: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments from the unpickled payload of `dumps_arguments`.

    Args:
        sent: A tuple of positional arguments, which may be empty, or a list of a tuple and a dict. The types of the two
            elements of a list are not checked.

    Raises:
        TypeError, ValueError: `sent` is neither a tuple nor has two elements.
    """
    if type(sent) is tuple:
        return sent, {}
    args, kwargs = sent  # a call with keyword arguments is sent as a list of the two
    return args, kwargs


def dumps_plain_arguments(args: Sequence[Any]) -> Pickled | None:
    """Returns the payload and the buffers of simple arguments, faster than `dumps_arguments`; None for all others.

    Arguments are simple if `pack_arguments` can pack them, which are arrays of numbers. They are also simple if each is
    None, of a type in `ATOMS` (int, float, complex, bool, str) or a `bytes` of less than `BUFFER_MIN_BYTES`. So they
    contain no references to remote objects. Also returns None if there are no arguments, or `args` is not a tuple.
    Never raises. The caller must not change the list of buffers.
    """
    if type(args) is not tuple or not args:
        return None
    if type(args[0]) in ARRAYS:
        return pack_arguments(args)
    for value in args:
        if (
            value is not None
            and type(value) not in ATOMS
            and (type(value) is not bytes or len(value) >= BUFFER_MIN_BYTES)
        ):
            return None
    return _pickle_dumps(args, 5), _NO_BUFFERS


def dumps_plain_result(value: Any) -> Pickled | None:
    """Returns the payload and the buffers of a simple result, faster than `dumps_result`; None for any other result.

    A result is simple if `pack_array` can pack it, which is an array of numbers. A result of a type in `ATOMS` (int,
    float, complex, bool, str) and a `bytes` of less than `BUFFER_MIN_BYTES` are simple, too. The value None is not
    simple. The caller must not change the list of buffers.
    """
    kind = type(value)
    if kind in ATOMS or (kind is bytes and len(value) < BUFFER_MIN_BYTES):
        return _pickle_dumps(value, 5), _NO_BUFFERS
    return pack_array(value) if kind in ARRAYS else None


def dumps_result(function: Callable[..., Any] | str, value: Any, worker: str = "") -> Pickled:
    """Returns the payload and the buffers of the result of a call; an empty payload for None.

    Args:
        function: The function or its name, for error messages.
        value: The result.
        worker: The name of the worker that ran the function, for error messages; empty if unknown.

    Raises:
        SerializationError: The result cannot be pickled. The message names the function and the type.
    """
    if value is None:
        return b"", []
    if type(value) in ARRAYS and (packed := pack_array(value)) is not None:
        return packed
    if type(value) in BUFFER_TYPES:
        ((value,), _) = wrap_buffers([(value,), {}])
    buffers = _OutOfBand()
    try:
        return _pickle(value, buffers), buffers
    except Exception as error:
        what = f"the result of {_possessive(worker, callable_name(function))}"
        advice = "Return plain data instead, or keep the object there and return only what the caller needs of it"
        raise _unpicklable_error(what, "the result", value, error, advice) from error


def _as_tuple(args: Any) -> tuple[Any, ...]:
    """Returns an iterable of arguments as a tuple; an empty one for no elements.

    Raises `UsageError` for a str, bytes, a set, a mapping, and for what is not iterable.
    """
    hint = "for one argument, (x,)"
    if isinstance(args, Mapping):
        hint = "did you mean kwargs?"
    elif not isinstance(args, (str, bytes, bytearray, Set)):  # a str is one argument, and a set has no order
        try:
            return tuple(args)
        except TypeError:
            pass
    raise UsageError(f"args must be a tuple or list of arguments, not {args!r}: {hint}")


def _as_dict(kwargs: Any) -> dict[str, Any]:
    """Returns a mapping as a dict. Raises `UsageError` for anything else."""
    if not isinstance(kwargs, Mapping):
        raise UsageError(f"kwargs must be a dict from names to arguments, not {kwargs!r}")
    return dict(kwargs)


def _pickle(value: Any, buffers: _OutOfBand | None) -> bytes:
    """Returns the pickle of a value: by pickle, or by cloudpickle if pickle fails or `__main__` is interactive.

    Args:
        value: The value. None is pickled as any other value.
        buffers: An empty list that collects the large buffers, which stay out of the pickle; None keeps all buffers in.

    Raises:
        Exception: What cloudpickle raises for a value that cannot be pickled, such as `TypeError` or
            `pickle.PicklingError`.
    """
    try:
        # An interactive __main__ has no __file__, or None. In both cases the value is pickled by value below.
        if _modules["__main__"].__file__:
            if REDUCERS:
                return dumps_reduced(value, buffers)
            return _pickle_dumps(value, 5, buffer_callback=buffers)
    except Exception:
        pass
    if buffers is not None:
        buffers.clear()
    from farcall.serialization.by_value import dumps_by_value  # imported here: see the module

    return dumps_by_value(value, buffers)


def _possessive(worker: str, function: str) -> str:
    """Returns "worker1's `add`" for messages, or "`add`" if `worker` is empty."""
    return f"{worker}'s `{function}`" if worker else f"`{function}`"


def _is_picklable(value: Any) -> bool:
    """Returns True if a value can be pickled, with its functions and classes by value where necessary; else False.

    Finds out by pickling it. Never raises an `Exception`.
    """
    try:
        _pickle(value, _OutOfBand())
    except Exception:
        return False
    return True


def _unpicklable_argument_error(
    function: Callable[..., Any] | str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    worker: str,
    by_value: bool,
    error: Exception,
) -> SerializationError:
    """Returns the error for arguments that cannot be pickled: it names the first argument to blame, or the function.

    If each argument can be pickled alone, it blames all together. Does not raise the error.

    Args:
        function: The function that was called, or its name.
        args: The positional arguments.
        kwargs: The keyword arguments; may be empty.
        worker: The name of the callee, for the message; empty if unknown.
        by_value: Whether the function itself was pickled, too.
        error: The exception that pickle raised.
    """
    name = callable_name(function)
    of = _possessive(worker, name)
    advice = f"Pass plain data instead, or create it on {worker or 'the worker that needs it'}"
    if by_value and not _is_picklable(function):
        advice = "Pass what the function needs as plain arguments, or call a function of a module"
        return _unpicklable_error(
            f"the function `{name}`" + (f" for {worker}" if worker else ""), name, function, error, advice
        )
    for position, value in enumerate(args):
        if not _is_picklable(value):
            parameter = _parameter_name(function, position)
            what = f"argument {position + 1}" + (f" ({parameter!r})" if parameter else "")
            return _unpicklable_error(f"{what} of {of}", parameter or "the argument", value, error, advice)
    for keyword, value in kwargs.items():
        if not _is_picklable(value):
            return _unpicklable_error(f"argument {keyword!r} of {of}", str(keyword), value, error, advice)
    # Each argument alone can be pickled. Together they are nested too deeply, or need too much memory.
    return _unpicklable_error(f"the arguments of {of}", "the arguments", args, error, advice)


def _parameter_name(function: Callable[..., Any] | str, position: int) -> str | None:
    """Returns the name of the parameter that gets the positional argument number `position`, from 0 on.

    Returns None if it is not known: `function` is only a name or has no signature, or the argument is one of `*args`.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]
        parameter = parameters[position]
    except Exception:  # only a name, a builtin without a signature, or too many arguments
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return parameter.name if parameter.kind in positional else None


def _unpicklable_error(what: str, root: str, value: Any, error: Exception, advice: str) -> SerializationError:
    """Returns the error for a value that cannot be pickled: it names the part of the value that is to blame.

    Does not raise the error.

    Args:
        what: What cannot be pickled, such as "the result of `add`".
        root: The name of the value, with which the path to the part begins.
        value: The value.
        error: The exception that pickle raised.
        advice: What to do instead, as a sentence without a period.
    """
    if isinstance(error, MemoryError):
        return SerializationError(f"{what} cannot be pickled: there is not enough memory for it. Send it in parts")
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        kind = type_name(value)
        return SerializationError(f"{what} cannot be pickled: this `{kind}` is nested too deeply. Send it flattened")
    path, culprit = find_unpicklable(root, value, _is_picklable)
    subject = "it" if culprit is value else path
    return SerializationError(
        f"{what} cannot be pickled: {subject} is a `{type_name(culprit)}` ({type(error).__name__}: {error}). {advice}"
    )
