"""Sends the exceptions of remote functions to their callers, and rebuilds them there.

An exception arrives as a copy with its own type, args, attributes, notes, cause and context. It gets one more note: the
traceback on the worker that raised it. If its class does not exist on the caller, a `RemoteError` takes its place.

Theory of operation: the payload of a failure is a pickle of plain tuples, one *node* for each exception that the raised
one is connected with (causes, contexts, members of groups, exceptions in arguments or attributes). A node has the text
of its exception and a *recipe* to rebuild it. Parts that need classes of the user are pickled separately inside the
recipe, so that a part that cannot be rebuilt is the only one lost. The recipes:

    bare    the class, and separately the state; no constructor runs, because many constructors do not accept `args`
    group   the same for an exception group, whose members are other nodes of the payload
    whole   a pickle of the exception itself; preferred for classes that define how they are pickled
    None    none: only the text is sent

Most failures are one exception whose arguments are all text. These are sent without pickle, after the byte
`_SHORT_MARK`, because checking the opcodes of a pickle takes longer than everything else.

Rules
- The sender tries each recipe before it sends it.
- Exceptions are read with the descriptors of `BaseException`, so that their classes cannot interfere.
- `encode_failure` and `decode_failure` never raise and never change their arguments, with one exception: what a signal
  handler raises (Ctrl-C, an exit) passes through `decode_failure`, because it runs in the thread of a waiting user.
- A payload is checked before any of it is used, because it may come from an attacker. Cyclic groups, too many
  exceptions, and texts or values that are used far more often than they were sent are refused from every sender.
- An exception from an untrusted sender has no cyclic causes and contexts, because some programs follow them to their
  end, and must be printable without side effects (`restricted.exceptions`). If it is not an `Exception`, it arrives as
  a `RemoteError`, because a `SystemExit`, say, would end the caller's program.
- Frames of farcall itself are left out of the remote traceback, and so is the middle of a long traceback.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import reprlib
import signal
import traceback
from collections.abc import Callable, Iterator
from types import GetSetDescriptorType, MemberDescriptorType, TracebackType
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from farcall.errors import RemoteError
from farcall.serialization.payload import Buffer, dumps_inline, loads
from farcall.serialization.restricted.exceptions import MAX_MEMBERS, are_printable, hides_method, is_dropped, is_sound
from farcall.serialization.restricted.plain_types import is_reserved
from farcall.serialization.restricted.unpickler import loads_plain
from farcall.serialization.unpicklable import class_name

_MAX_EXCEPTIONS: Final = 1000
"""How many exceptions a payload may have. More are left out."""
_MAX_TEXT: Final = 1 << 20
"""How many characters of the text of an exception are sent."""
_MAX_REPEATED: Final = 1 << 17
"""How many values, and bytes of inner pickles, a payload may use beyond its own length by using the same ones again."""
_MAX_REPEATED_TEXT: Final = 1 << 26
"""How many characters of text a payload may use beyond eight times its own length by using the same texts again."""

# Descriptors to read and write attributes of exceptions without running code of their classes.
_ARGS: Final[Any] = vars(BaseException)["args"]
_DICT: Final[Any] = vars(BaseException)["__dict__"]
_CAUSE: Final[Any] = vars(BaseException)["__cause__"]
_CONTEXT: Final[Any] = vars(BaseException)["__context__"]
_SUPPRESS: Final[Any] = vars(BaseException)["__suppress_context__"]
_TRACEBACK: Final[Any] = vars(BaseException)["__traceback__"]
_MESSAGE: Final[Any] = vars(BaseExceptionGroup)["message"]
_MEMBERS: Final[Any] = vars(BaseExceptionGroup)["exceptions"]

_NOT_STATE: Final[dict[type, tuple[str, ...]]] = {
    BaseExceptionGroup: ("message", "exceptions"),  # sent in the recipe; they cannot be set afterwards
    # The object that lacked the attribute may be a whole model. The receiver would drop both anyway (`is_dropped`).
    AttributeError: ("obj",),
    ImportError: ("name_from",),
}
"""Slots of builtin exceptions that are not sent as part of the state."""
_PICKLING_METHODS: Final = {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}
_HEAP_TYPE: Final = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the flag of classes that a class statement has created, as opposed to builtin classes."""

# The forms of a value (an argument or attribute) in a recipe. The first element is one of these:
_PLAIN: Final = 0  # (_PLAIN, the value)
_PICKLED: Final = 1  # (_PICKLED, its pickle, its text in case it cannot be unpickled)
_EXCEPTION: Final = 2  # (_EXCEPTION, the index of its node)
_PLAIN_TYPES: Final = {type(None), bool, int, float, complex, str, bytes}

_SHORT_MARK: Final = 2
"""The first byte of a failure in the short form. No pickle begins with it."""
_ShortFailure: TypeAlias = tuple[str, str, str, str, list[str], bool, bytes, list[str]]
"""The worker and the function; and of the exception: its type, its message, its notes, whether its context is
suppressed, its pickled class, and its arguments."""
_encode_short: Final = msgspec.msgpack.Encoder().encode
_decode_short: Final = msgspec.msgpack.Decoder(_ShortFailure).decode

Value: TypeAlias = tuple[Any, ...]
"""An argument or attribute of an exception in a recipe, in one of three forms.

It is (_PLAIN, the value), (_PICKLED, its pickle, its text in case it cannot be unpickled) or (_EXCEPTION, the index of
its node).
"""
Loader: TypeAlias = Callable[[Buffer], Any]
"""A function that unpickles, such as `loads` or `loads_restricted`."""

_repr: Final = reprlib.Repr()  # limits the output, and looks only at the first few elements of a list
_repr.maxstring = _repr.maxother = 300


class _State(NamedTuple):
    """The state of an exception in a payload: everything but its class.

    A `Value` is one argument or attribute. It is a tuple: `(_PLAIN, value)`, `(_PICKLED, pickle, text)`, or
    `_EXCEPTION` and the index of a node.

    Attributes:
        args: The `args` of the exception; empty for an exception group, whose arguments are sent separately.
        slots: The attributes outside `__dict__` that are set: of `__slots__`, and of builtin exceptions, such as
            `errno`.
        attributes: The contents of `__dict__`, without `__notes__`.
    """

    args: list[Value]
    slots: dict[str, Value]
    attributes: dict[str, Value]


class _Node(NamedTuple):
    """One exception in the payload of a failure, which is a list of nodes.

    Nodes refer to each other by their indexes in the list; the raised exception has index 0.

    Attributes:
        type_name: The full name of the class, such as "json.decoder.JSONDecodeError".
        message: The text of the exception.
        notes: The notes of the exception, and the remote traceback as one more; may be empty.
        recipe: How to rebuild the exception; None if only the text is sent. It is ("bare", pickled class, state),
            ("whole", pickle), or for an exception group ("group", pickled class, state, message, indexes of the
            members).
        cause: The index of the node of `__cause__`; None if there is none.
        context: The index of the node of `__context__`; None if there is none.
        suppress_context: The value of `__suppress_context__`.
    """

    type_name: str
    message: str
    notes: list[str]
    recipe: tuple[Any, ...] | None
    cause: int | None
    context: int | None
    suppress_context: bool


def encode_failure(error: BaseException, worker: str, function: str) -> bytes:
    """Returns the payload of an exception that a remote function has raised. Never raises.

    What cannot be pickled of the exception is sent as text.

    Args:
        error: The exception. It is not changed.
        worker: The name of the worker that ran the function.
        function: The name of the function.
    """
    try:
        nodes = _Encoder(worker, function).encode(error)
    except BaseException:
        nodes = [_text_node(error)]
    return _encode_short_failure(worker, function, nodes) or pickle.dumps(
        (worker, function, [tuple(node) for node in nodes]), 5
    )


def _encode_short_failure(worker: str, function: str, nodes: list[_Node]) -> bytes | None:
    """Returns the payload of a failure in the short form, which needs no pickle; None if it does not fit.

    `nodes` has a `_Node` for each exception, at least one. The short form holds one exception without attributes, whose
    arguments are all texts, and which can be rebuilt from its class. Never raises.
    """
    type_name, message, notes, recipe, cause, context, suppress = nodes[0]
    if len(nodes) > 1 or cause is not None or context is not None or recipe is None or recipe[0] != "bare":
        return None
    args, slots, attributes = recipe[2]
    texts = [value[1] for value in args if value[0] == _PLAIN and type(value[1]) is str]
    if slots or attributes or len(texts) < len(args):
        return None
    try:
        return b"\2" + _encode_short((worker, function, type_name, message, notes, suppress, recipe[1], texts))
    except ValueError:  # half of a surrogate pair, which msgpack cannot encode
        return None


def encode_failure_text(type_name: str, message: str, worker: str, function: str) -> bytes:
    """Returns the payload of a failure that has only text, from which `decode_failure` makes a `RemoteError`.

    Any of the texts may be empty.

    Args:
        type_name: The name of the type of the error.
        message: Its text.
        worker: The name of the worker on which it happened.
        function: The name of the function that was called.
    """
    return pickle.dumps((worker, function, [tuple(_Node(type_name, message, [], None, None, None, False))]), 5)


def decode_failure(payload: Buffer, load: Loader | None = None) -> BaseException:
    """Returns the exception of a failure; a `RemoteError` if it cannot be rebuilt, or the payload is invalid or empty.

    Raises nothing itself; what a signal handler raises meanwhile passes through.

    Args:
        payload: What `encode_failure` or `encode_failure_text` returned.
        load: Unpickles the parts that need classes of the user. None trusts the sender and uses `loads`. Give a
            function if the sender is not trusted. Then an exception that is not an `Exception`, such as `SystemExit`,
            or that is not safe to print, becomes a `RemoteError`.
    """
    try:
        worker, function, nodes = _read(payload)
    except BaseException as error:
        if _came_by_signal(error):
            raise
        return RemoteError(f"a remote function raised an exception that cannot be read here: {_short_repr(error)}")
    try:
        return _rebuild(worker, function, nodes, load)
    except BaseException as error:
        if _came_by_signal(error):
            raise
        return _remote_error(nodes[0], worker, function, error)


def describe_failure(payload: Buffer) -> str:
    """Returns the type and message of a failure as text, "ValueError: no such file", without rebuilding the exception.

    Runs no code that the payload names. For an invalid or empty payload the text says that it cannot be read. Never
    raises.
    """
    try:
        _, _, nodes = _read(payload)
        return f"{nodes[0].type_name}: {nodes[0].message}"
    except Exception:
        return "an exception that cannot be read here"


def _read(payload: Buffer) -> tuple[str, str, list[_Node]]:
    """Returns the name of the worker, the name of the function and the checked nodes of the payload of a failure.

    A node describes one exception; there is at least one. Raises `TypeError`, `ValueError`, `NotAllowedError`,
    `IndexError` (an empty payload) or another exception if the payload is not a valid failure.
    """
    if payload[0] == _SHORT_MARK:
        worker, function, type_name, message, notes, suppress, cls, texts = _decode_short(memoryview(payload)[1:])
        state = _State([(_PLAIN, text) for text in texts], {}, {})
        return worker, function, [_Node(type_name, message, notes, ("bare", cls, state), None, None, suppress)]
    worker, function, fields = loads_plain(payload)
    _check_types((worker, str), (function, str), (fields, list))
    if not 0 < len(fields) <= _MAX_EXCEPTIONS:
        raise ValueError(f"a failure has {len(fields)} exceptions; 1 to {_MAX_EXCEPTIONS} are allowed")
    nodes = [_Node(*field) for field in fields]
    allowance = _Allowance(len(payload))
    for node in nodes:
        allowance.copy(len(worker) + len(function))
        _check_node(node, nodes, allowance)
    return worker, function, nodes


class _Allowance:
    """How much work the payload of a failure may still cause.

    A pickle contains each object once, even if it is used many times. But each use is checked, unpickled or copied. So
    without a limit, a short payload could cause any amount of work and memory.

    Args:
        length: The length of the payload in bytes. A longer payload may cause more work.
    """

    __slots__ = ("_copied", "_used")

    def __init__(self, length: int) -> None:
        self._used = length + _MAX_REPEATED
        self._copied = 8 * length + _MAX_REPEATED_TEXT

    def use(self, count: int) -> None:
        """Counts `count` more uses of values, or bytes of inner pickles; 0 changes nothing.

        Raises `ValueError` when the total exceeds the sum of `_MAX_REPEATED` and the bytes of the payload.
        """
        self._used -= count
        if self._used < 0:
            raise ValueError("a failure uses the same values again and again")

    def copy(self, characters: int) -> None:
        """Counts characters of text that are copied; 0 changes nothing.

        Raises `ValueError` when the total exceeds the sum of `_MAX_REPEATED_TEXT` and eight times the bytes of the
        payload.
        """
        self._copied -= characters
        if self._copied < 0:
            raise ValueError("a failure uses the same texts again and again")


def _check_node(node: _Node, nodes: list[_Node], allowance: _Allowance) -> None:
    """Raises an exception if a received node, which describes one exception, is not valid; else returns None.

    Its fields must have the right types, and its indexes must exist in `nodes`. Its texts and values are counted in
    `allowance`, which limits the work that a payload may cause. Raises `ValueError` if the allowance is used up, and
    `TypeError`, `ValueError`, `KeyError` or `IndexError` if the node is not valid.
    """
    type_name, message, notes, recipe, cause, context, suppress = node
    _check_types((type_name, str), (message, str), (notes, list), (suppress, bool))
    allowance.use(len(notes))
    _check_types(*((note, str) for note in notes))
    allowance.copy(3 * len(type_name) + 2 * len(message) + sum(map(len, notes)))
    for index in (cause, context):
        if index is not None:
            _check_index(index, nodes)
    if recipe is not None:
        _check_recipe(recipe, nodes, allowance)


def _check_recipe(recipe: Any, nodes: list[_Node], allowance: _Allowance) -> None:
    """Raises an exception if a recipe, which says how to rebuild an exception, is not valid; else returns None.

    A received recipe must be a tuple of a known kind, with parts of the right types and with indexes that exist in
    `nodes`. Its values are counted in `allowance`, which limits the work that a payload may cause. Raises `ValueError`
    if the allowance is used up, and `TypeError`, `ValueError`, `KeyError` or `IndexError` if the recipe is not valid.
    """
    _check_types((recipe, tuple), (recipe[0], str), (recipe[1], bytes))
    kind = recipe[0]
    if len(recipe) != {"bare": 3, "group": 5, "whole": 2}[kind]:
        raise ValueError("a failure has a recipe of the wrong length")
    allowance.use(len(recipe[1]))
    if kind == "whole":
        return
    args, slots, attributes = recipe[2]
    _check_types((args, list), (slots, dict), (attributes, dict))
    allowance.use(len(args) + len(slots) + len(attributes))
    _check_types(*((name, str) for names in (slots, attributes) for name in names))
    for value in (*args, *slots.values(), *attributes.values()):
        _check_value(value, nodes)
        if value[0] == _PICKLED:
            allowance.use(len(value[1]))
    if kind == "group":
        _check_types((recipe[3], str), (recipe[4], list))
        allowance.use(len(recipe[4]))
        for index in recipe[4]:
            _check_index(index, nodes)


def _check_types(*expected: tuple[Any, type]) -> None:
    """Raises `TypeError` if a value is not exactly of the type that it is paired with; subclasses do not count.

    Does nothing without pairs.
    """
    for value, kind in expected:
        if type(value) is not kind:
            raise TypeError(f"a failure has a {type(value).__name__} where a {kind.__name__} is expected")


def _check_index(index: Any, nodes: list[_Node]) -> None:
    """Returns None if `index` is an int from 0 to the number of nodes minus one, else raises `ValueError`."""
    if type(index) is not int or not 0 <= index < len(nodes):
        raise ValueError("a failure refers to an exception that it does not contain")


def _check_value(value: Any, nodes: list[_Node]) -> None:
    """Raises `TypeError`, `ValueError` or `IndexError` if a received argument or attribute is not in a valid form.

    The forms are `(_PLAIN, value)`, `(_PICKLED, pickle, text)` and `(_EXCEPTION, index of a node in nodes)`.
    """
    _check_types((value, tuple))
    kind, held, *text = value
    if kind == _EXCEPTION:
        _check_index(held, nodes)
    elif kind == _PICKLED:
        _check_types((held, bytes), (text[0], str))
    elif kind != _PLAIN or type(held) not in _PLAIN_TYPES:
        raise TypeError("a failure has an argument or attribute of an unknown kind")


class _Encoder:
    """Turns an exception, and all exceptions that it is connected with, into nodes. Use it for one payload.

    A node describes one exception: its text, and how to rebuild it. Call `encode` once.

    Args:
        worker: The name of the worker that ran the function, for the notes.
        function: The name of the function, for the notes.
    """

    def __init__(self, worker: str, function: str) -> None:
        self._origin = f"(worker {worker!r}, in `{function}`)"
        self._indexes: dict[int, int] = {}
        # The exceptions in the order of their nodes. The list also keeps them alive, so that their ids stay unique.
        self._found: list[BaseException] = []

    def encode(self, error: BaseException) -> list[_Node]:
        """Returns the nodes of an exception and of all exceptions that it is connected with, its own first.

        An exception is connected with its cause and its context, with the members of an exception group, and with
        exceptions in its arguments and attributes. There are at most `_MAX_EXCEPTIONS` nodes. A node that cannot be
        made has only the text of its exception. Never raises.
        """
        self._index_of(error)
        nodes: list[_Node] = []
        while len(nodes) < len(self._found):  # making a node may add exceptions to `_found`
            error = self._found[len(nodes)]
            try:
                nodes.append(self._node(error))
            except BaseException:
                nodes.append(_text_node(error))
        return nodes

    def _index_of(self, error: Any) -> int | None:
        """Returns the index that an exception has in the list of nodes, and reserves the next one for a new exception.

        Returns None if `error` is not an exception, or the payload has `_MAX_EXCEPTIONS` already.
        """
        if not issubclass(type(error), BaseException):
            return None
        index = self._indexes.get(id(error))
        if index is None and len(self._found) < _MAX_EXCEPTIONS:
            index = self._indexes[id(error)] = len(self._found)
            self._found.append(error)
        return index

    def _node(self, error: BaseException) -> _Node:
        """Returns the node of one exception: its text, its notes with the remote traceback, its recipe and its causes.

        The recipe says how to rebuild it. Reserves nodes for the exceptions that it refers to. May raise what the
        exception's class raises.
        """
        notes = _own_notes(error)
        frames = format_frames(_TRACEBACK.__get__(error))
        if frames:
            notes.append(f"\nRemote traceback {self._origin}:\n{frames}")
        elif error is self._found[0]:
            notes.append(f"\nRaised remotely {self._origin}, and its traceback has no frames outside farcall")
        # The cause gets its index before exceptions in arguments do, because it matters most if there are too many.
        cause, context = self._index_of(_CAUSE.__get__(error)), self._index_of(_CONTEXT.__get__(error))
        recipe = self._recipe(error, notes)
        suppress = bool(_SUPPRESS.__get__(error))
        return _text_node(error)._replace(
            notes=notes, recipe=recipe, cause=cause, context=context, suppress_context=suppress
        )

    def _recipe(self, error: BaseException, notes: list[str]) -> tuple[Any, ...] | None:
        """Returns how to rebuild an exception: the first recipe that works, as a tuple; None if none does.

        Adds a note to `notes` if members of an exception group are left out. Never raises.
        """
        cls = type(error)
        attempts = [self._split, self._whole]
        if _defines_pickling(cls):
            attempts.reverse()
        for attempt in attempts:
            try:
                return attempt(error, notes)
            except BaseException:
                continue
        return None

    def _whole(self, error: BaseException, notes: list[str]) -> tuple[Any, ...]:
        """Returns the recipe ("whole", pickle of the exception). Leaves `notes` alone.

        Raises what pickle raises if it cannot be pickled or unpickled, and `TypeError` if unpickling it gives another
        type.
        """
        payload = dumps_inline(error)
        _check(type(loads(payload)) is type(error))
        return "whole", payload

    def _split(self, error: BaseException, notes: list[str]) -> tuple[Any, ...]:
        """Returns a recipe of class and state: ("bare", pickled class, state).

        For an exception group it is ("group", pickled class, state, message, indexes of the members). Adds a note to
        `notes` if not all members of the exception group fit into the payload. Raises what pickle raises if the class
        cannot be pickled, and `TypeError` if an instance cannot be created without its constructor.
        """
        cls = type(error)
        class_payload = dumps_inline(cls)
        _check(loads(class_payload) is cls)
        if not issubclass(cls, BaseExceptionGroup):
            _check(type(_new_without_init(cls)) is cls)
            args = [self._value(value) for value in _ARGS.__get__(error)]
            return "bare", class_payload, tuple(self._state(error, args))
        member: BaseException = ValueError() if issubclass(cls, Exception) else KeyboardInterrupt()
        _check(type(BaseExceptionGroup.__new__(cls, "", [member])) is cls)
        members = _MEMBERS.__get__(error)
        indexes = [index for index in map(self._index_of, members) if index is not None]
        if len(indexes) < len(members):
            notes.append(f"{len(members) - len(indexes)} more exceptions of this group were left out")
        return "group", class_payload, tuple(self._state(error, [])), _text(_MESSAGE.__get__(error)), indexes

    def _state(self, error: BaseException, args: list[Value]) -> _State:
        """Returns the state of an exception: `args` as given, and its slots and attributes as `Value`s.

        The dicts of slots and attributes are empty if the exception has none. An attribute that cannot be pickled is
        replaced by its repr. `__notes__` is left out.
        """
        slots = {name: self._value(value) for name, value in _slots(error)}
        attributes = {
            name: self._value(value)
            for name, value in list(_DICT.__get__(error).items())
            if type(name) is str and name != "__notes__"
        }
        return _State(args, slots, attributes)

    def _value(self, value: Any) -> Value:
        """Returns an argument or attribute in the form in which it is sent.

        The form is `(_PLAIN, value)` for None, numbers, str and bytes, `(_EXCEPTION, index of its node)` for an
        exception that gets a node, and `(_PICKLED, pickle, repr)` for other values. If a value cannot be pickled or
        unpickled, it is `(_PLAIN, repr)`. Never raises.
        """
        if type(value) in _PLAIN_TYPES:
            return _PLAIN, value
        index = self._index_of(value)
        if index is not None:
            return _EXCEPTION, index
        text = _short_repr(value)
        try:
            payload = dumps_inline(value)
            loads(payload)
        except BaseException:
            return _PLAIN, text
        return _PICKLED, payload, text


def _rebuild(worker: str, function: str, nodes: list[_Node], load: Loader | None) -> BaseException:
    """Returns the exception that checked nodes describe, with its causes and contexts.

    An exception that cannot be rebuilt becomes a `RemoteError`; the others are not affected. If `load` is given, the
    raised exception also becomes a `RemoteError` if it is not an `Exception`, or if printing it is not safe. Raises
    `ValueError` if exception groups contain each other.

    Args:
        worker: The name of the worker that raised it.
        function: The name of the function that was called.
        nodes: The nodes, one for each exception, that of the raised exception first; not empty.
        load: Unpickles the parts that need classes of the user; None trusts the sender and uses `loads`.
    """
    built: dict[int, BaseException] = {}
    unfilled: set[int] = set()
    for index in _members_first(nodes):
        node = nodes[index]
        try:
            built[index] = _create(node, built, load or loads)
            if node.recipe is not None and node.recipe[0] != "whole":
                unfilled.add(index)
        except BaseException as reason:
            if _came_by_signal(reason):
                raise
            built[index] = _remote_error(node, worker, function, reason)
    # The states are set when all exceptions exist, because exceptions may contain each other.
    for index, node in enumerate(nodes):
        error = built[index]
        if node.recipe is not None and index in unfilled:
            state = _State(*node.recipe[2])
            _fill(error, node.recipe[0], _settable(error, state, load is None), built, load or loads)
        if node.notes:
            _DICT.__get__(error)["__notes__"] = list(node.notes)
    if load is not None and not isinstance(built[0], Exception):
        return _remote_error(
            nodes[0], worker, function, TypeError("it is not an Exception, and would end this program")
        )
    if load is not None and not (all(map(is_sound, built.values())) and are_printable(built.values())):
        return _remote_error(nodes[0], worker, function, TypeError("it has contents that are not safe to print"))
    for index, node in enumerate(nodes if load is None else _without_cycles(nodes)):
        error = built[index]
        if node.cause is not None:
            _CAUSE.__set__(error, built[node.cause])
        if node.context is not None:
            _CONTEXT.__set__(error, built[node.context])
        _SUPPRESS.__set__(error, node.suppress_context)
    return built[0]


def _members_first(nodes: list[_Node]) -> Iterator[int]:
    """Yields the indexes of all nodes; members of an exception group come before the exception group itself.

    Yields nothing for no nodes. Raises `ValueError` if exception groups contain each other, or if printing one would
    print more than `MAX_MEMBERS` exceptions.
    """
    printed: dict[int, int] = {}  # for an index: how many exceptions are printed for it
    for first in range(len(nodes)):
        waiting = [first]
        path: set[int] = set()
        while waiting:
            index = waiting[-1]
            recipe = nodes[index].recipe
            members = recipe[4] if recipe is not None and recipe[0] == "group" else []
            missing = {member for member in members if member not in printed}
            if index in printed:
                waiting.pop()
            elif not missing:
                waiting.pop()
                path.discard(index)
                printed[index] = 1 + sum(printed[member] for member in members)
                if printed[index] > MAX_MEMBERS:
                    raise ValueError("a failure has groups that contain the same exceptions too often")
                yield index
            elif index in path:
                # It waits for its members, and one of them waits for it.
                raise ValueError("a failure has groups that contain each other")
            else:
                path.add(index)
                waiting.extend(missing)


def _without_cycles(nodes: list[_Node]) -> list[_Node]:
    """Returns copies of the nodes in which causes and contexts that close a cycle are None.

    Returns equal nodes if there is no cycle. The given nodes are not changed.
    """
    found = list(nodes)
    done: set[int] = set()
    for first in range(len(nodes)):
        path: list[tuple[int, list[str]]] = [(first, ["cause", "context"])] if first not in done else []
        on_path = {first}
        while path:
            index, links = path[-1]
            if not links:
                path.pop()
                on_path.discard(index)
                done.add(index)
                continue
            link = links.pop()
            target = getattr(found[index], link)
            if target in on_path:
                node = found[index]
                found[index] = node._replace(cause=None) if link == "cause" else node._replace(context=None)
            elif target is not None and target not in done:
                path.append((target, ["cause", "context"]))
                on_path.add(target)
    return found


def _create(node: _Node, built: dict[int, BaseException], load: Loader) -> BaseException:
    """Returns the exception of a node, without its args and attributes unless its recipe is "whole".

    Args:
        node: The node, which describes one exception.
        built: The exceptions that exist already, by the indexes of their nodes. If the node is an exception group, its
            members must be among them.
        load: Unpickles the class or the whole exception.

    Raises:
        Exception: The exception cannot be rebuilt here: `TypeError` if the node has no recipe or gives no exception, or
            what `load` raises.
    """
    if node.recipe is None:
        raise TypeError("it could not be pickled")
    kind, payload = node.recipe[:2]
    rebuilt = load(payload)
    if kind != "whole":
        _check(issubclass(type(rebuilt), type) and issubclass(rebuilt, BaseException))
    if kind == "bare":
        rebuilt = _new_without_init(rebuilt)
    elif kind == "group":
        rebuilt = BaseExceptionGroup.__new__(rebuilt, node.recipe[3], [built[index] for index in node.recipe[4]])
    _check(issubclass(type(rebuilt), BaseException))
    return rebuilt  # type: ignore[no-any-return]  # checked above


def _new_without_init(cls: type) -> Any:
    """Returns an instance of an exception class, without running a `__new__` or `__init__` of the user.

    Uses `__new__` of the nearest builtin class along `__base__`, not the MRO, because `__base__` decides the layout.
    That `cls` is an exception class is not checked.
    """
    base: Any = cls
    while base.__flags__ & _HEAP_TYPE:
        base = base.__base__
    return base.__new__(cls)


def _fill(error: BaseException, kind: str, state: _State, built: dict[int, BaseException], load: Loader) -> None:
    """Sets the state (args and attributes) of a new exception. A slot that cannot be set is skipped.

    Args:
        error: The exception.
        kind: The kind of its recipe: "bare", or "group" for an exception group, whose args are set already.
        state: The state.
        built: All exceptions of the payload, by the indexes of their nodes.
        load: Unpickles values. A value that it cannot unpickle is replaced by its text.
    """
    if kind == "bare":
        _ARGS.__set__(error, tuple(_unpack(value, built, load) for value in state.args))
    _DICT.__get__(error).update((name, _unpack(value, built, load)) for name, value in state.attributes.items())
    for name, value in state.slots.items():
        for cls in type(error).__mro__:
            if type(vars(cls).get(name)) in (MemberDescriptorType, GetSetDescriptorType):
                try:
                    vars(cls)[name].__set__(error, _unpack(value, built, load))
                except (AttributeError, TypeError):  # it is read-only, or its value was replaced by text
                    pass
                break


def _settable(error: BaseException, state: _State, trusted: bool) -> _State:
    """Returns the state without the attributes that must not be set on `error`, because the interpreter would use them.

    If the sender is not `trusted`, also without names like `__this__` and names that would hide methods. `args` is
    kept.
    """

    def is_settable(name: str) -> bool:
        if is_dropped(error, name, trusted):
            return False
        return trusted or not (is_reserved(name) or hides_method(error, name))

    slots, attributes = (
        {name: value for name, value in values.items() if is_settable(name)}
        for values in (state.slots, state.attributes)
    )
    return _State(state.args, slots, attributes)


def _unpack(value: Value, built: dict[int, BaseException], load: Loader) -> Any:
    """Returns the argument or attribute that `value` stands for; its text if it cannot be unpickled.

    `value` is `(_PLAIN, value)`, `(_PICKLED, pickle, text)` or `(_EXCEPTION, index of a node)`, already checked.
    `built` has the exceptions by the indexes of their nodes, and `load` unpickles. Raises only what a signal handler
    raises.
    """
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


def _remote_error(node: _Node, worker: str, function: str, reason: BaseException) -> RemoteError:
    """Returns the `RemoteError` that takes the place of an exception that cannot be rebuilt.

    Its text names the worker, the function, and the type and message of the exception. `reason` is why it cannot be
    rebuilt.
    """
    traceback = "\n".join(node.notes).strip("\n")
    return RemoteError(
        f"worker {worker!r} raised {node.type_name} in `{function}`: {node.message}\n"
        f"(it cannot be rebuilt here: {_text(reason)}. Original exception on remote side was: {node.type_name})",
        node.type_name,
        node.message,
        traceback,
    )


def _defines_pickling(cls: Any) -> bool:
    """Returns True if an exception class, or a base class of the user, defines how it is pickled; else False.

    It does so by a method such as `__reduce__` or by `copyreg`.
    """
    if cls in copyreg.dispatch_table:
        return True
    return any(not _PICKLING_METHODS.isdisjoint(vars(base)) for base in cls.__mro__ if base.__flags__ & _HEAP_TYPE)


def _slots(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of the attributes of an exception that are outside `__dict__` and set.

    Yields nothing if there are none. Attributes of builtin exceptions that are None count as not set.
    """
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
            # Builtin exceptions return None for attributes that are not set. Setting them to None would change the
            # text: OSError would print "[Errno None]".
            if value is not None or cls.__flags__ & _HEAP_TYPE:
                yield name, value


def _own_notes(error: BaseException) -> list[str]:
    """Returns the notes of an exception as a list of texts; an empty list if it has none.

    Notes that are not text, or not a list, are converted to text.
    """
    notes = _DICT.__get__(error).get("__notes__", [])
    if type(notes) not in (list, tuple):
        return [_short_repr(notes)]
    return [note if type(note) is str else _text(note) for note in notes]


def _text_node(error: BaseException) -> _Node:
    """Returns a node, the description of one exception, with only its type and its text. Never raises."""
    return _Node(class_name(type(error)), _text(error), [], None, None, None, False)


def _text(value: object) -> str:
    """Returns `str(value)`, cut to `_MAX_TEXT` characters; a text with its type if that fails. Never raises."""
    try:
        text = str.__str__(str(value))  # str() may return a subclass of str, which could pickle itself in its own way
    except BaseException:
        return f"<a {class_name(type(value))} without text>"
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text) - _MAX_TEXT} characters more)"


def _short_repr(value: object) -> str:
    """Returns the repr of a value, cut to about 300 characters; a text with its type if that fails. Never raises."""
    try:
        return str.__str__(_repr.repr(value))
    except BaseException:
        return f"<a {class_name(type(value))}>"


def _came_by_signal(error: BaseException) -> bool:
    """Returns True if a signal handler raised an exception, False if code that rebuilds the failure did.

    A `KeyboardInterrupt` always counts; a `SystemExit` counts if its traceback goes through a signal handler.
    """
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
    """Raises `TypeError` if `condition` is false: what was unpickled is not what it should be. Else returns None."""
    if not condition:
        raise TypeError("its pickle gives something else when it is unpickled")


# Tracebacks as text

_FARCALL_DIRECTORY: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_FIRST_FRAMES: Final = 20
"""How many of the outermost frames of a long traceback are shown."""
_LAST_FRAMES: Final = 60
"""How many of the innermost frames of a long traceback are shown."""


def format_frames(trace: TracebackType | None) -> str:
    """Returns the frames of a traceback with their source lines, without a final line break. Never raises.

    Frames of farcall itself, and the middle of a long traceback, are left out. Returns an empty text for None, or if no
    frame is left, and a text that says so if the frames cannot be read.
    """
    try:
        return _format(trace)
    except Exception as error:  # for example because the loader of a module fails to return its source
        return f"  (its frames cannot be shown: {type(error).__name__})"


def find_raising_function(error: BaseException) -> str:
    """Returns the name of the outermost function outside farcall that an exception passed through.

    A method is named "Model.step". Returns an empty text if there is none, for example because the exception was not
    raised.
    """
    trace: TracebackType | None = _TRACEBACK.__get__(error)
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_FARCALL_DIRECTORY):
            return code.co_qualname.rpartition("<locals>.")[2]
        trace = trace.tb_next
    return ""


def _format(trace: TracebackType | None) -> str:
    """Returns the frames of a traceback outside farcall as text, with source lines and without a final line break.

    The middle of a long traceback is left out. Returns an empty text for None, or if no frame is left. May raise what
    the loader of a module raises.
    """
    levels = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_FARCALL_DIRECTORY):
            levels.append(trace)
        trace = trace.tb_next
    left_out = len(levels) - _FIRST_FRAMES - _LAST_FRAMES
    if left_out <= 0:
        return _lines(levels)
    return f"{_lines(levels[:_FIRST_FRAMES])}\n  ... {left_out} frames left out ...\n{_lines(levels[-_LAST_FRAMES:])}"


def _lines(levels: list[TracebackType]) -> str:
    """Returns the file, line and source of each of some levels of a traceback, as text without a final line break.

    Returns an empty text for no levels.
    """
    frames = [frame for level in levels for frame in traceback.extract_tb(level, limit=1)]
    return "".join(traceback.format_list(frames)).rstrip("\n")
