"""How objects become buffers, and buffers objects again.

A value becomes a *payload* (bytes) and a list of large buffers beside it, which are views of the caller's own memory:
nothing large is copied here. Pickle's C code does the work. Only what it refuses (lambdas, closures, local classes)
goes a second time, by value, through cloudpickle.

Rules
- An empty payload is None, or a call without arguments: what is sent most costs nothing.
- A buffer of less than `OUT_OF_BAND_SIZE` bytes stays in the payload: one more piece to send costs more than its copy.
- Plain memory (`bytes`, a `memoryview` ...) that is an argument or a result itself is such a buffer, too (`raw`).
- Arguments that are all plain arrays, and a result that is one, do without pickle (`plain_arrays`).
- Functions and classes of a script's `__main__` go by name, as those of any module do: all workers run that script,
  and a function must see the globals of the worker that runs it. An interactive `__main__` (a notebook, a prompt,
  `python -c`) exists in one process only, so what it defines goes by value.
- A child of `multiprocessing`'s spawn knows the script as `__mp_main__`; both names mean the receiver's own script.
- What cannot be pickled raises `SerializationError`, which names the argument and what in it is to blame. The search
  for that happens after the failure, so the fast path knows nothing of it.

Not here: what by value means (`by_value`), how functions are named (`callables`), how exceptions travel
(`failures`). No sockets, no threads.
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
from farcall.serialization.callables import IN_THE_SCRIPT, callable_name
from farcall.serialization.plain_arrays import (
    ARRAYS,
    MARK,
    OUT_OF_BAND_SIZE,
    notice,
    pack_arguments,
    pack_value,
    unpack,
)
from farcall.serialization.raw import LEAST, RAW, has_raw, lifted
from farcall.serialization.reducers import REDUCERS, dumps_reduced
from farcall.serialization.unpicklable import find_unpicklable, type_name

MOST_OUT_OF_BAND: Final = 0xFFFF
"""A message can carry only so many."""

Pickled: TypeAlias = tuple[bytes, list[memoryview]]
"""A payload, and the buffers that travel beside it, in order. They are views: do not change what they show."""

Buffer: TypeAlias = bytes | bytearray | memoryview

ATOMS: Final = frozenset({int, float, complex, bool, str})
"""What holds nothing else, neither a buffer nor a reference, and needs no code to be made again."""

_NO_BUFFERS: Final[list[memoryview]] = []

_modules = sys.modules


class _OutOfBand(list[memoryview]):
    """Collects the large buffers of one value. Being its own callback saves the making of a closure per value."""

    __slots__ = ()

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether the buffer shall stay in the payload. Pickle itself has refused those that are not contiguous."""
        if not ARRAYS:
            notice()
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND_SIZE:
            return True
        if len(self) == MOST_OUT_OF_BAND:
            raise OverflowError(f"it has more than {MOST_OUT_OF_BAND} large buffers; send it in parts")
        self.append(view)
        return False


def dumps(value: Any) -> Pickled:
    """The payload and the large buffers of a value.

    Raises `SerializationError` if it cannot be pickled.
    """
    if value is None:
        return b"", []
    buffers = _OutOfBand()
    try:
        return _payload(value, buffers), buffers
    except Exception as error:
        raise _refusal("the value", "value", value, error, "Send plain data instead") from error


def dumps_inline(value: Any) -> bytes:
    """The payload of a value with all its buffers inside.

    Raises whatever pickle raises.
    """
    return _payload(value, None)


def dumps_atom(value: Any) -> bytes:
    """The payload of a value whose type is one of `ATOMS`. For that, the same as `dumps` and with fewer frames."""
    return _pickle_dumps(value, 5)


loads_atom: Final = _pickle_loads
"""`loads_atom(payload)`: what `dumps_atom` was given. Pickle's own function: raises whatever it raises."""


def loads(payload: Buffer, buffers: Sequence[Buffer] = ()) -> Any:
    """The value again. Large arrays in it use the memory of `buffers`.

    Raises `SerializationError` if it cannot be rebuilt here.
    """
    if not payload:
        return None
    try:
        if payload[0] == MARK:
            return unpack(payload, buffers)
        return _pickle_loads(payload, buffers=buffers) if buffers else _pickle_loads(payload)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "__mp_main__" not in _modules:
            # Sent by a spawned child of this very script. The name is what multiprocessing itself gives the script in
            # such a child; having it here too makes all that follows take the fast path.
            _modules["__mp_main__"] = _modules["__main__"]
            return loads(payload, buffers)
        raise not_rebuilt("what was sent", "here", error) from error


def not_rebuilt(what: str, where: str, reason: BaseException | None) -> SerializationError:
    """The error that says so, and what to do about it. `reason`: what `loads` ran into."""
    # Its repr is all that pickle says of a module that lacks something.
    missing_in_script = isinstance(reason, AttributeError) and repr(_modules["__main__"]) in str(reason)
    advice = IN_THE_SCRIPT if missing_in_script else "is the same code installed on both workers?"
    return SerializationError(f"{what} cannot be rebuilt {where} ({type(reason).__name__}: {reason}); {advice}")


def dumps_arguments(
    function: Callable[..., Any] | str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    worker: str = "",
    by_value: bool = False,
) -> Pickled:
    """The arguments of a call.

    `function` and `worker` (whom it is for) are for messages only, unless `by_value` is true: then the function itself
    travels in front of the arguments, pickled together with them, so that what they share stays shared.
    Raises `SerializationError`, naming the argument, if one cannot be pickled; `UsageError` if `args` or `kwargs` are
    no such thing.
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
        sent = lifted([sent, named]) if has_raw(sent) or has_raw(named.values()) else [sent, named]
    elif type(sent[0]) in ARRAYS and (packed := pack_arguments(sent)) is not None:
        return packed
    elif has_raw(sent):
        sent, _ = lifted([sent, {}])
    buffers = _OutOfBand()
    try:
        return _payload(sent, buffers), buffers
    except Exception as error:
        refusal = _blame_argument(function, args, kwargs or {}, worker, by_value, error)
        raise refusal from error


def loads_arguments(payload: Buffer, buffers: Sequence[Buffer] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call; the first of them is the function if it was sent by value.

    Raises `SerializationError` if they cannot be rebuilt here.
    """
    if not payload:
        return (), {}
    sent = loads(payload, buffers)
    if type(sent) is tuple:
        return sent, {}
    return as_arguments(sent)


def as_arguments(sent: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, of what `dumps_arguments` has sent. Raises `TypeError`, `ValueError` if it is not."""
    if type(sent) is tuple:
        return sent, {}
    args, kwargs = sent  # a list: the mark of a call with keywords
    return args, kwargs


def dumps_plain_arguments(args: Sequence[Any]) -> Pickled | None:
    """The arguments of a call that are all plain arrays, or all of `ATOMS` or few bytes; None for others, as for none.

    The same as `dumps_arguments` with fewer frames, for what is sent most. They carry no handles.
    """
    if type(args) is not tuple or not args:
        return None
    if type(args[0]) in ARRAYS:
        return pack_arguments(args)
    for value in args:
        if value is not None and type(value) not in ATOMS and (type(value) is not bytes or len(value) >= LEAST):
            return None
    return _pickle_dumps(args, 5), _NO_BUFFERS


def dumps_plain_result(value: Any) -> Pickled | None:
    """The same for a result, which is not None."""
    kind = type(value)
    if kind in ATOMS or (kind is bytes and len(value) < LEAST):
        return _pickle_dumps(value, 5), _NO_BUFFERS
    return pack_value(value) if kind in ARRAYS else None


def dumps_result(function: Callable[..., Any] | str, value: Any, worker: str = "") -> Pickled:
    """What a call gave. `function` and `worker` (where it ran) are for messages only.

    Raises `SerializationError`, naming the function and the type, if it cannot be pickled.
    """
    if value is None:
        return b"", []
    if type(value) in ARRAYS and (packed := pack_value(value)) is not None:
        return packed
    if type(value) in RAW:
        ((value,), _) = lifted([(value,), {}])
    buffers = _OutOfBand()
    try:
        return _payload(value, buffers), buffers
    except Exception as error:
        what = f"the result of {_owned(worker, callable_name(function))}"
        advice = "Return plain data instead, or leave the object where it is and return what is needed of it"
        raise _refusal(what, "the result", value, error, advice) from error


def _as_tuple(args: Any) -> tuple[Any, ...]:
    hint = "for one argument, (x,)"
    if isinstance(args, Mapping):
        hint = "did you mean kwargs?"
    elif not isinstance(args, (str, bytes, bytearray, Set)):  # text is no list of letters, and a set has no order
        try:
            return tuple(args)
        except TypeError:
            pass
    raise UsageError(f"args must be a tuple or list of arguments, not {args!r}: {hint}")


def _as_dict(kwargs: Any) -> dict[str, Any]:
    if not isinstance(kwargs, Mapping):
        raise UsageError(f"kwargs must be a dict of arguments by their names, not {kwargs!r}")
    return dict(kwargs)


def _payload(value: Any, buffers: _OutOfBand | None) -> bytes:
    try:
        # An interactive __main__ has no file, often not even the attribute: the AttributeError leads to by value, too.
        if _modules["__main__"].__file__:
            if REDUCERS:
                return dumps_reduced(value, buffers)
            return _pickle_dumps(value, 5, buffer_callback=buffers)
    except Exception:
        pass
    if buffers is not None:
        buffers.clear()
    from farcall.serialization.by_value import dumps_by_value  # late: see there

    return dumps_by_value(value, buffers)


def _owned(worker: str, function: str) -> str:
    return f"{worker}'s `{function}`" if worker else f"`{function}`"


def _is_picklable(value: Any) -> bool:
    try:
        _payload(value, _OutOfBand())
    except Exception:
        return False
    return True


def _blame_argument(
    function: Callable[..., Any] | str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    worker: str,
    by_value: bool,
    error: Exception,
) -> SerializationError:
    name = callable_name(function)
    of = _owned(worker, name)
    advice = f"Pass plain data instead, or make it on {worker or 'the worker that needs it'}"
    if by_value and not _is_picklable(function):
        advice = "Give it what it needs as plain arguments, or call a function of a module"
        return _refusal(f"the function `{name}`" + (f" for {worker}" if worker else ""), name, function, error, advice)
    for position, value in enumerate(args):
        if not _is_picklable(value):
            parameter = _parameter_name(function, position)
            what = f"argument {position + 1}" + (f" ({parameter!r})" if parameter else "")
            return _refusal(f"{what} of {of}", parameter or "the argument", value, error, advice)
    for keyword, value in kwargs.items():
        if not _is_picklable(value):
            return _refusal(f"argument {keyword!r} of {of}", str(keyword), value, error, advice)
    # Each for itself would do; together they nest too deeply or need too much.
    return _refusal(f"the arguments of {of}", "the arguments", args, error, advice)


def _parameter_name(function: Callable[..., Any] | str, position: int) -> str | None:
    try:
        parameters = list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]
        parameter = parameters[position]
    except Exception:  # a name only, a builtin without a signature, more arguments than parameters
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return parameter.name if parameter.kind in positional else None


def _refusal(what: str, root: str, value: Any, error: Exception, advice: str) -> SerializationError:
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
