"""How an exception of a user's function travels.

It arrives as a copy with its own type, args, attributes, notes, cause and context, and with one more note: the
traceback of where it was raised. If its class cannot be had on the receiving side, a `RemoteError` stands in for it.

The payload is a pickle of plain tuples, one for each exception that hangs together with the raised one (causes,
contexts, members of groups, exceptions in arguments or attributes), each with its text and its *recipe*. What only the
user's classes can rebuild is pickled once more inside, piece by piece, so that what fails there loses that piece
alone. The recipes:

    bare    the class and the state apart; no constructor runs, as constructors take other things than `args`
    group   the same for an exception group: its members are other exceptions of this payload
    whole   a pickle of the exception itself: tried first for classes that say how they want to be pickled
    None    the text alone

Rules: each recipe is tried out before it is sent. An exception is read with the descriptors of `BaseException`, past
whatever its class overrides. `encode_failure` and `decode_failure` never raise, and never change what they are given;
what a signal handler raises (Ctrl-C, an exit) alone passes through the decoding, which happens where a person may wait.
"""

from __future__ import annotations

import copyreg
import pickle
import reprlib
import signal
from collections.abc import Callable, Iterator
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final, NamedTuple, TypeAlias

from farcall.errors import RemoteError
from farcall.serialization.guarded import loads_plain
from farcall.serialization.pickler import Buffer, dumps_inline, loads
from farcall.serialization.plain_types import is_reserved, is_sound
from farcall.serialization.remote_traceback import format_frames
from farcall.serialization.unpicklable import class_name

_MAX_EXCEPTIONS: Final = 1000
_MAX_TEXT: Final = 1 << 20

_ARGS: Final[Any] = vars(BaseException)["args"]
_DICT: Final[Any] = vars(BaseException)["__dict__"]
_CAUSE: Final[Any] = vars(BaseException)["__cause__"]
_CONTEXT: Final[Any] = vars(BaseException)["__context__"]
_SUPPRESS: Final[Any] = vars(BaseException)["__suppress_context__"]
_TRACEBACK: Final[Any] = vars(BaseException)["__traceback__"]
_MESSAGE: Final[Any] = vars(BaseExceptionGroup)["message"]
_MEMBERS: Final[Any] = vars(BaseExceptionGroup)["exceptions"]

_NOT_STATE: Final[dict[type, tuple[str, ...]]] = {
    BaseExceptionGroup: ("message", "exceptions"),  # they make the group, and cannot be set
    AttributeError: ("obj",),  # whatever it was that lacked the attribute: a whole model, perhaps
}
_OWN_PICKLING: Final = {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, not built into the interpreter

# Values: how an argument or attribute stands in a recipe.
_PLAIN: Final = 0  # (_PLAIN, the value)
_PICKLED: Final = 1  # (_PICKLED, its pickle, its text, should the pickle be of no use over there)
_EXCEPTION: Final = 2  # (_EXCEPTION, its place in the payload)
_PLAIN_TYPES: Final = {type(None), bool, int, float, complex, str, bytes}

Value: TypeAlias = tuple[Any, ...]
Loader: TypeAlias = Callable[[Buffer], Any]

_repr: Final = reprlib.Repr()  # looks at the first few elements only, however long a list is
_repr.maxstring = _repr.maxother = 300


class _State(NamedTuple):
    """What an exception holds, apart from its class."""

    args: list[Value]
    slots: dict[str, Value]
    """Attributes with a place of their own: `__slots__`, and those of builtin exceptions, such as `OSError.errno`."""
    attributes: dict[str, Value]


class _Node(NamedTuple):
    """One exception in the payload."""

    type_name: str
    message: str
    notes: list[str]
    """Its own, then the remote traceback."""
    recipe: tuple[Any, ...] | None
    """("bare", pickled class, state), ("group", pickled class, state, message, places), ("whole", pickle) or None."""
    cause: int | None
    context: int | None
    suppress_context: bool


def encode_failure(error: BaseException, worker: str, function: str) -> bytes:
    """The exception that `function` raised on `worker`, ready to travel. Never raises."""
    try:
        nodes = _Encoder(worker, function).encode(error)
    except BaseException:
        nodes = [_text_only(error)]
    return pickle.dumps((worker, function, [tuple(node) for node in nodes]), 5)


def encode_text(type_name: str, message: str, worker: str, function: str) -> bytes:
    """A failure of which there is the text alone; it is rebuilt as a `RemoteError`."""
    return pickle.dumps((worker, function, [tuple(_Node(type_name, message, [], None, None, None, False))]), 5)


def decode_failure(payload: Buffer, load: Loader | None = None) -> BaseException:
    """The exception again, or a `RemoteError` in its place. Raises nothing but what signal handlers raise.

    What only classes of users can rebuild is given to `load`, if there is one: the payload is not trusted then.
    """
    try:
        worker, function, fields = loads_plain(payload)
        return _rebuild(worker, function, [_Node(*field) for field in fields], load or loads)
    except BaseException as error:
        if _came_by_signal(error):
            raise
        return RemoteError(f"a function raised an exception that cannot be read here: {_described(error)}")


def describe_failure(payload: Buffer) -> str:
    """Its type and message as text, without rebuilding it: runs no code of anybody. Never raises."""
    try:
        _, _, fields = loads_plain(payload)
        node = _Node(*fields[0])
        return f"{node.type_name}: {node.message}"
    except Exception:
        return "an exception that cannot be read here"


class _Encoder:
    """Walks from one exception to all that hang together with it. Serves for one payload."""

    def __init__(self, worker: str, function: str) -> None:
        self._origin = f"(worker {worker!r}, in `{function}`)"
        self._places: dict[int, int] = {}
        self._found: list[BaseException] = []  # in their places; also keeps them alive, and so their ids unique

    def encode(self, error: BaseException) -> list[_Node]:
        self._place(error)
        nodes: list[_Node] = []
        while len(nodes) < len(self._found):  # grows while we go
            error = self._found[len(nodes)]
            try:
                nodes.append(self._node(error))
            except BaseException:
                nodes.append(_text_only(error))
        return nodes

    def _place(self, error: Any) -> int | None:
        """Where that exception is in the payload, or None if there is none, or no room for more."""
        if not issubclass(type(error), BaseException):
            return None
        place = self._places.get(id(error))
        if place is None and len(self._found) < _MAX_EXCEPTIONS:
            place = self._places[id(error)] = len(self._found)
            self._found.append(error)
        return place

    def _node(self, error: BaseException) -> _Node:
        notes = _own_notes(error)
        frames = format_frames(_TRACEBACK.__get__(error))
        if frames:
            notes.append(f"\nRemote traceback {self._origin}:\n{frames}")
        elif error is self._found[0]:
            notes.append(f"\nRaised remotely {self._origin}, in no Python function of its own")
        # The cause has its place before exceptions in arguments: should there be no room, it is the one to keep.
        cause, context = self._place(_CAUSE.__get__(error)), self._place(_CONTEXT.__get__(error))
        recipe = self._recipe(error, notes)
        suppress = bool(_SUPPRESS.__get__(error))
        return _text_only(error)._replace(
            notes=notes, recipe=recipe, cause=cause, context=context, suppress_context=suppress
        )

    def _recipe(self, error: BaseException, notes: list[str]) -> tuple[Any, ...] | None:
        cls = type(error)
        attempts = [self._split, self._whole]
        if _says_how_to_pickle(cls):
            attempts.reverse()
        for attempt in attempts:
            try:
                return attempt(error, notes)
            except BaseException:
                continue
        return None

    def _whole(self, error: BaseException, notes: list[str]) -> tuple[Any, ...]:
        payload = dumps_inline(error)
        _check(type(loads(payload)) is type(error))
        return "whole", payload

    def _split(self, error: BaseException, notes: list[str]) -> tuple[Any, ...]:
        cls = type(error)
        class_payload = dumps_inline(cls)
        _check(loads(class_payload) is cls)
        if not issubclass(cls, BaseExceptionGroup):
            _check(type(_new(cls)) is cls)
            args = [self._value(value) for value in _ARGS.__get__(error)]
            return "bare", class_payload, tuple(self._state(error, args))
        member: BaseException = ValueError() if issubclass(cls, Exception) else KeyboardInterrupt()
        _check(type(BaseExceptionGroup.__new__(cls, "", [member])) is cls)
        members = _MEMBERS.__get__(error)
        places = [place for place in map(self._place, members) if place is not None]
        if len(places) < len(members):
            notes.append(f"{len(members) - len(places)} more exceptions of this group were left out")
        return "group", class_payload, tuple(self._state(error, [])), _text(_MESSAGE.__get__(error)), places

    def _state(self, error: BaseException, args: list[Value]) -> _State:
        slots = {name: self._value(value) for name, value in _slots(error)}
        attributes = {
            name: self._value(value)
            for name, value in list(_DICT.__get__(error).items())
            if type(name) is str and name != "__notes__"
        }
        return _State(args, slots, attributes)

    def _value(self, value: Any) -> Value:
        if type(value) in _PLAIN_TYPES:
            return _PLAIN, value
        place = self._place(value)
        if place is not None:
            return _EXCEPTION, place
        text = _described(value)
        try:
            payload = dumps_inline(value)
            loads(payload)
        except BaseException:
            return _PLAIN, text
        return _PICKLED, payload, text


def _rebuild(worker: str, function: str, nodes: list[_Node], load: Loader) -> BaseException:
    built: dict[int, BaseException] = {}
    unfilled: set[int] = set()
    for place in _members_first(nodes):
        node = nodes[place]
        try:
            built[place] = _create(node, built, load)
            if node.recipe is not None and node.recipe[0] != "whole":
                unfilled.add(place)
        except BaseException as reason:
            if _came_by_signal(reason):
                raise
            built[place] = _stand_in(node, worker, function, reason)
    # Only now, as exceptions may hold each other in circles.
    for place, node in enumerate(nodes):
        error = built[place]
        if node.recipe is not None and place in unfilled:
            state = _State(*node.recipe[2])
            _fill(error, node.recipe[0], state if load is loads else _without_reserved(state), built, load)
            _check(load is loads or is_sound(error))
        if node.cause is not None:
            _CAUSE.__set__(error, built[node.cause])
        if node.context is not None:
            _CONTEXT.__set__(error, built[node.context])
        _SUPPRESS.__set__(error, node.suppress_context)
        if node.notes:
            _DICT.__get__(error)["__notes__"] = list(node.notes)
    return built[0]


def _members_first(nodes: list[_Node]) -> Iterator[int]:
    """All places, those of a group's members before the group's own. Groups cannot hold each other in circles."""
    done: set[int] = set()
    for first in range(len(nodes)):
        waiting = [first]
        while waiting:
            place = waiting[-1]
            recipe = nodes[place].recipe
            members = recipe[4] if recipe is not None and recipe[0] == "group" else []
            missing = [member for member in members if member not in done]
            if missing:
                waiting.extend(missing)
            else:
                waiting.pop()
                if place not in done:
                    done.add(place)
                    yield place


def _create(node: _Node, built: dict[int, BaseException], load: Loader) -> BaseException:
    if node.recipe is None:
        raise TypeError("it could not be pickled")
    kind, payload = node.recipe[:2]
    rebuilt = load(payload)
    if kind == "bare":
        rebuilt = _new(rebuilt)
    elif kind == "group":
        rebuilt = BaseExceptionGroup.__new__(rebuilt, node.recipe[3], [built[place] for place in node.recipe[4]])
    _check(issubclass(type(rebuilt), BaseException))
    return rebuilt  # type: ignore[no-any-return]  # checked above


def _new(cls: type) -> Any:
    """An instance whose constructor has not run. `__base__`, not the MRO: it is what decides the layout."""
    base: Any = cls
    while base.__flags__ & _HEAP_TYPE:
        base = base.__base__
    return base.__new__(cls)


def _fill(error: BaseException, kind: str, state: _State, built: dict[int, BaseException], load: Loader) -> None:
    if kind == "bare":
        _ARGS.__set__(error, tuple(_unpack(value, built, load) for value in state.args))
    _DICT.__get__(error).update((name, _unpack(value, built, load)) for name, value in state.attributes.items())
    for name, value in state.slots.items():
        for cls in type(error).__mro__:
            if type(vars(cls).get(name)) in (MemberDescriptorType, GetSetDescriptorType):
                try:
                    vars(cls)[name].__set__(error, _unpack(value, built, load))
                except (AttributeError, TypeError):  # it can be read only, or was replaced by a text that does not fit
                    pass
                break


def _without_reserved(state: _State) -> _State:
    """Without what only the interpreter and pickle set."""
    slots, attributes = (
        {name: value for name, value in values.items() if type(name) is str and not is_reserved(name)}
        for values in (state.slots, state.attributes)
    )
    return _State(state.args, slots, attributes)


def _unpack(value: Value, built: dict[int, BaseException], load: Loader) -> Any:
    if value[0] == _PLAIN:
        return value[1]
    if value[0] == _EXCEPTION:
        return built[value[1]]
    try:
        return load(value[1])
    except BaseException as error:
        if _came_by_signal(error):
            raise
        return value[2]


def _stand_in(node: _Node, worker: str, function: str, reason: BaseException) -> RemoteError:
    traceback = "\n".join(node.notes).strip("\n")
    return RemoteError(
        f"worker {worker!r} raised {node.type_name} in `{function}`: {node.message}\n"
        f"(it cannot be rebuilt here: {_text(reason)}. Original exception on remote side was: {node.type_name})",
        node.type_name,
        node.message,
        traceback,
    )


def _says_how_to_pickle(cls: Any) -> bool:
    if cls in copyreg.dispatch_table:
        return True
    return any(not _OWN_PICKLING.isdisjoint(vars(base)) for base in cls.__mro__ if base.__flags__ & _HEAP_TYPE)


def _slots(error: BaseException) -> Iterator[tuple[str, Any]]:
    for cls in type(error).__mro__:
        if cls is BaseException or cls is object:
            continue
        for name, descriptor in list(vars(cls).items()):
            if type(descriptor) not in (MemberDescriptorType, GetSetDescriptorType):
                continue
            if name in ("__dict__", "__weakref__") or name in _NOT_STATE.get(cls, ()):
                continue
            try:
                value = descriptor.__get__(error)
            except AttributeError:  # not set
                continue
            # In builtin exceptions None stands for "not set", too; setting it makes OSError print "[Errno None]".
            if value is not None or cls.__flags__ & _HEAP_TYPE:
                yield name, value


def _own_notes(error: BaseException) -> list[str]:
    notes = _DICT.__get__(error).get("__notes__", [])
    if type(notes) not in (list, tuple):
        return [_described(notes)]
    return [note if type(note) is str else _text(note) for note in notes]


def _text_only(error: BaseException) -> _Node:
    return _Node(class_name(type(error)), _text(error), [], None, None, None, False)


def _text(value: object) -> str:
    try:
        text = str.__str__(str(value))  # str() may give a subclass of str, with a pickle of its own
    except BaseException:
        return f"<a {class_name(type(value))} without text>"
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text) - _MAX_TEXT} characters more)"


def _described(value: object) -> str:
    try:
        return str.__str__(_repr.repr(value))
    except BaseException:
        return f"<a {class_name(type(value))}>"


def _came_by_signal(error: BaseException) -> bool:
    """Whether a signal handler of the program raised it, rather than what is being rebuilt."""
    if isinstance(error, KeyboardInterrupt):
        return True
    if not isinstance(error, SystemExit):
        return False
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    trace = _TRACEBACK.__get__(error)
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _check(condition: bool) -> None:
    if not condition:
        raise TypeError("what was pickled comes back as something else")
