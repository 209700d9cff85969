"""Checks the opcodes of a pickle from an untrusted peer before it is unpickled.

Unpickling cannot be interrupted, and pickle's C code trusts its input. A short pickle can reserve gigabytes, nest
tuples so deeply that hashing one overflows the C stack, or share tuples so often that hashing one takes years. So the
opcodes are run once without creating any object, to learn how deep and how large the values get.

Rules
- Only opcodes that protocols 3 to 5 of pickle write are accepted: none for extension codes, and none of the old opcodes
  that look up a class and call it in one step.
- The memo is filled in order, as pickle does: C code reserves memory up to the index that an opcode names.
- A length is at most the number of bytes that are left of the pickle.
- Values are nested at most `MAX_DEPTH` deep, which is about as deep as Python itself pickles by default.
- Hashing reads an element each time that it is reached. The elements read for one tuple, and for all keys and
  members of sets together, are at most `MAX_HASHED` more than the pickle has bytes.

The count is exact for values that cannot change any more: tuples, frozensets, and objects by their arguments. A list
that is changed after it was put into another value counts there as it was before. This does no harm, because Python
frees, compares and prints deep lists without overflowing the C stack; `deque` is the exception, see `unpickler`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from typing import Final, TypeAlias

from farcall.errors import NotAllowedError

MAX_DEPTH: Final = 1000
"""How deep values may be nested."""
MAX_HASHED: Final = 10_000_000
"""How many elements hashing may read, in addition to the number of bytes of the pickle."""

_Value: TypeAlias = list[int] | tuple[int, int]
"""What is known about a value: how deep it is, and how many elements hashing it reads. It is a list for a value that
may still change, so that the stack and the memo share the list and see its changes."""

_ATOM: Final = (0, 1)
"""A value that contains no other values."""
_FLAT_TUPLES: Final = ((1, 1), (1, 2), (1, 3), (1, 4))
"""Tuples of 0 to 3 atoms."""

# The kinds of opcodes.
_UNKNOWN, _OLD, _FIXED, _SHORT, _SIZED, _MEMO, _LOWER, _UPPER = range(8)
#   _UNKNOWN  no opcode of pickle
#   _OLD      written only by old protocols, or for extension codes: refused
#   _FIXED    pushes an atom, with an argument of fixed size
#   _SHORT    pushes an atom, with an argument whose length is in one byte
#   _SIZED    pushes an atom, with an argument whose length is in four or eight bytes
#   _MEMO     MEMOIZE, which is frequent
#   _LOWER    any other, with a code below 0x80
#   _UPPER    any other, with a code from 0x80 on

_KINDS: Final = [_UNKNOWN] * 256
"""The kind of each opcode."""
_SIZES: Final = [0] * 256
"""For a `_FIXED` opcode the number of bytes with its argument; for a `_SIZED` opcode the number of bytes of the length.
A length beyond the end of the pickle is noticed when the next opcode is read."""


def _declare(kind: int, opcodes: dict[bytes, int]) -> None:
    """Enters opcodes into the tables `_KINDS` and `_SIZES`. An empty dict changes nothing.

    Args:
        kind: The kind of all these opcodes, such as `_FIXED`.
        opcodes: The opcodes, one byte each, with their entries in `_SIZES`: for `_FIXED` the number of bytes with the
            argument, for `_SIZED` the number of bytes of the length. For other kinds the number has no meaning.
    """
    for opcode, size in opcodes.items():
        _KINDS[opcode[0]], _SIZES[opcode[0]] = kind, size


_declare(
    _FIXED,
    {
        pickle.NONE: 1,
        pickle.NEWTRUE: 1,
        pickle.NEWFALSE: 1,
        pickle.EMPTY_TUPLE: 1,
        pickle.NEXT_BUFFER: 1,
        pickle.BININT1: 2,
        pickle.BININT2: 3,
        pickle.BININT: 5,
        pickle.BINFLOAT: 9,
    },
)
_declare(_SHORT, dict.fromkeys((pickle.SHORT_BINUNICODE, pickle.SHORT_BINBYTES, pickle.LONG1), 1))
_declare(_MEMO, {pickle.MEMOIZE: 1})
_declare(
    _SIZED,
    {
        pickle.BINUNICODE: 4,
        pickle.BINUNICODE8: 8,
        pickle.BINBYTES: 4,
        pickle.BINBYTES8: 8,
        pickle.BYTEARRAY8: 8,
        pickle.LONG4: 4,
    },
)
_declare(
    _LOWER,
    dict.fromkeys(
        (
            pickle.STOP,
            pickle.MARK,
            pickle.POP,
            pickle.POP_MARK,
            pickle.BINGET,
            pickle.LONG_BINGET,
            pickle.BINPUT,
            pickle.LONG_BINPUT,
            pickle.GLOBAL,
            pickle.REDUCE,
            pickle.BUILD,
            pickle.TUPLE,
            pickle.EMPTY_LIST,
            pickle.EMPTY_DICT,
            pickle.APPEND,
            pickle.APPENDS,
            pickle.SETITEM,
            pickle.SETITEMS,
            pickle.BINPERSID,
        ),
        1,
    ),
)
_declare(
    _UPPER,
    dict.fromkeys(
        (
            pickle.PROTO,
            pickle.FRAME,
            pickle.STACK_GLOBAL,
            pickle.NEWOBJ,
            pickle.NEWOBJ_EX,
            pickle.TUPLE1,
            pickle.TUPLE2,
            pickle.TUPLE3,
            pickle.EMPTY_SET,
            pickle.ADDITEMS,
            pickle.FROZENSET,
            pickle.READONLY_BUFFER,
        ),
        1,
    ),
)
_declare(
    _OLD,
    dict.fromkeys(
        (
            pickle.DUP,
            pickle.FLOAT,
            pickle.INT,
            pickle.LONG,
            pickle.PERSID,
            pickle.STRING,
            pickle.BINSTRING,
            pickle.SHORT_BINSTRING,
            pickle.UNICODE,
            pickle.DICT,
            pickle.LIST,
            pickle.INST,
            pickle.OBJ,
            pickle.GET,
            pickle.PUT,
            pickle.EXT1,
            pickle.EXT2,
            pickle.EXT4,
        ),
        0,
    ),
)

_RUNS: Final = {
    code: re.compile(b"(?:%b%b)+" % (re.escape(bytes([code])), b"." * (_SIZES[code] - 1)), re.DOTALL)
    for code in range(256)
    if _KINDS[code] == _FIXED
}
"""For each `_FIXED` opcode, a pattern that matches a run of it with arguments."""

_HARMLESS: Final = bytes(
    code
    for code in range(256)
    if _KINDS[code] != _OLD and code not in b"hjqrcB\x8e\x96"  # BINGET to GLOBAL, BINBYTES, BINBYTES8, BYTEARRAY8
)
"""Bytes that do no harm in a pickle of at most `MAX_DEPTH` bytes, whether they are opcodes or arguments. A pickle of
these bytes alone cannot use a value twice or reserve memory, and cannot be nested deeper than it is long."""


def check_opcodes(payload: bytes) -> None:
    """Raises an exception if a pickle is not safe to unpickle, even with a guard for its names; else returns None.

    Unpickles nothing.

    Raises:
        NotAllowedError: It is too deep, would take too long to hash, skips indexes of the memo, or has old opcodes.
        pickle.UnpicklingError, ValueError: It is not a valid pickle. Not all invalid pickles are found: an empty one
            and some short ones pass, and unpickling them raises.
    """
    if len(payload) <= MAX_DEPTH and not payload.translate(None, _HARMLESS):
        return
    try:
        _run(payload)
    except IndexError:
        raise pickle.UnpicklingError("a pickle is truncated, or pops from an empty stack") from None


def _run(payload: bytes) -> None:
    """Runs the opcodes of a pickle on pairs of depth and cost of hashing (`_Value`) instead of objects.

    Returns at the STOP opcode. Opcodes are compared in the order of how often they occur, and their codes are written
    as numbers, for speed.

    Raises `IndexError` if the pickle is truncated or pops from an empty stack, `NotAllowedError` if it is too deep, too
    costly to hash, skips indexes of the memo or has old opcodes, and `UnpicklingError` or `ValueError` if it is not
    valid.
    """
    atom, kinds, sizes = _ATOM, _KINDS, _SIZES
    length = len(payload)
    most = MAX_HASHED + length
    hashed = 0
    stack: list[_Value] = []
    marked: list[list[_Value]] = []
    memo: list[_Value] = []
    at = 0
    while True:
        code = payload[at]
        kind = kinds[code]
        if kind == _FIXED:
            size = sizes[code]
            if payload[at + size] == code == payload[at + 2 * size]:
                # Numbers come in long runs. The regular expression finds the end of a run in C.
                end = _RUNS[code].match(payload, at).end()  # type: ignore[union-attr]  # at least three match
                stack += [atom] * ((end - at) // size)
                at = end
            else:
                stack.append(atom)
                at += size
        elif kind == _SHORT:
            at += 2 + payload[at + 1]
            stack.append(atom)
            if payload[at] == 0x94:  # MEMOIZE, which pickle writes after each text
                memo.append(atom)
                at += 1
        elif kind == _MEMO:
            memo.append(stack[-1])
            at += 1
        elif kind == _SIZED:
            start = at + 1 + sizes[code]
            size = int.from_bytes(payload[at + 1 : start], "little")
            at = start + size
            # Texts and bytes cache their hash. That of a large int (LONG4) is computed from all its bytes each time.
            stack.append(atom if code != 0x8B or size < 256 else (0, size // 8))
        elif kind == _UPPER:
            at += 1
            if code <= 0x87:
                if code == 0x80:  # PROTO
                    at += 1
                elif code == 0x81:  # NEWOBJ
                    args = stack.pop()
                    stack[-1] = list(args)
                else:  # TUPLE1, TUPLE2, TUPLE3
                    count = code - 0x84
                    items = stack[-count:]
                    if len(items) < count:
                        raise IndexError
                    is_flat = items.count(atom) == count
                    stack[-count:] = [_FLAT_TUPLES[count] if is_flat else _frozen_value(items, most)]
            elif code == 0x95:  # FRAME
                at += 8
                if int.from_bytes(payload[at - 8 : at], "little") > length - at:
                    raise IndexError
            elif code == 0x93:  # STACK_GLOBAL
                stack[-2:] = [atom]
            elif code == 0x8F:  # EMPTY_SET
                stack.append([1, 1])
            elif code == 0x90:  # ADDITEMS
                items, stack = stack, marked.pop()
                _deepen(stack[-1], items)
                hashed = _count_hashed(items, hashed, most)
            elif code == 0x91:  # FROZENSET
                items, stack = stack, marked.pop()
                hashed = _count_hashed(items, hashed, most)
                stack.append(_frozen_value(items, most))
            elif code == 0x92:  # NEWOBJ_EX
                kwargs, args = stack.pop(), stack.pop()
                stack[-1] = [max(args[0], kwargs[0]), args[1]]
            # The remaining one, READONLY_BUFFER, changes nothing here.
        elif kind == _LOWER:
            at += 1
            if code == 0x68:  # BINGET
                stack.append(memo[payload[at]])
                at += 1
            elif code == 0x28:  # MARK
                marked.append(stack)
                stack = []
            elif code == 0x74:  # TUPLE
                items, stack = stack, marked.pop()
                stack.append(_frozen_value(items, most))
            elif code == 0x5D or code == 0x7D:  # EMPTY_LIST, EMPTY_DICT
                stack.append([1, 1])
            elif code == 0x65:  # APPENDS
                items, stack = stack, marked.pop()
                _deepen(stack[-1], items)
            elif code == 0x75:  # SETITEMS
                items, stack = stack, marked.pop()
                _deepen(stack[-1], items)
                hashed = _count_hashed(items[::2], hashed, most)
            elif code == 0x2E:  # STOP
                if at > length:
                    raise IndexError
                return
            elif code == 0x52:  # REDUCE
                args = stack.pop()
                stack[-1] = list(args)
            elif code == 0x61:  # APPEND
                value = stack.pop()
                _deepen(stack[-1], [value])
            elif code == 0x73:  # SETITEM
                items = stack[-2:]
                del stack[-2:]
                _deepen(stack[-1], items)
                hashed = _count_hashed(items[:1], hashed, most)
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(payload[at : at + 4], "little")])
                at += 4
            elif code == 0x71:  # BINPUT
                _put(memo, payload[at], stack[-1])
                at += 1
            elif code == 0x72:  # LONG_BINPUT
                _put(memo, int.from_bytes(payload[at : at + 4], "little"), stack[-1])
                at += 4
            elif code == 0x63:  # GLOBAL
                at = payload.index(b"\n", payload.index(b"\n", at) + 1) + 1
                stack.append(atom)
            elif code == 0x62:  # BUILD
                state = stack.pop()
                _deepen(stack[-1], [state])
            elif code == 0x30:  # POP
                if stack:
                    stack.pop()
                else:
                    stack = marked.pop()
            elif code == 0x31:  # POP_MARK
                stack = marked.pop()
            else:  # BINPERSID
                stack[-1] = atom
        elif kind == _OLD:
            raise NotAllowedError("a pickle with opcodes of an old protocol is not allowed; use protocol 5")
        else:
            raise pickle.UnpicklingError(f"a pickle has the unknown opcode {code}")


def _put(memo: list[_Value], index: int, value: _Value) -> None:
    """Sets the entry `index` of the memo, or adds one at its end. Raises `NotAllowedError` for an index beyond that."""
    if index > len(memo):
        raise NotAllowedError("a pickle that skips indexes of its memo is not allowed")
    memo[index : index + 1] = [value]


def _other_than_atoms(items: list[_Value]) -> Iterable[_Value]:
    """Returns the items that are not atoms (values without parts), in their order; nothing if there are none."""
    atom = _ATOM
    return () if items.count(atom) == len(items) else [item for item in items if item is not atom]


def _frozen_value(items: list[_Value], most: int) -> _Value:
    """Returns the depth of a tuple or frozenset with these items, and how many elements hashing it reads.

    Each item is such a pair, too: its depth, and how many elements hashing it reads. Without items, both numbers are 1.
    Raises `NotAllowedError` if the result is deeper than `MAX_DEPTH`, or hashing it reads more than `most` elements.
    """
    depth, visited = 0, 1 + len(items)
    for item in _other_than_atoms(items):
        if item[0] > depth:
            depth = item[0]
        visited += item[1] - 1
    if depth >= MAX_DEPTH:
        raise _too_deep()
    if visited > most:
        raise NotAllowedError("a pickle with a tuple that would take too long to hash is not allowed")
    return depth + 1, visited


def _deepen(target: _Value, items: list[_Value]) -> None:
    """Updates the depth of `target`, a list, set, dict or object to which these items are added.

    `target` and the items are `_Value`s: the depth, and how many elements hashing reads. An atom (a value without
    parts) stays as it is, and no items change nothing. Raises `NotAllowedError` if `target` gets deeper than
    `MAX_DEPTH`.
    """
    depth = target[0] - 1
    for item in _other_than_atoms(items):
        if item[0] > depth:
            depth = item[0]
    if depth >= MAX_DEPTH:
        raise _too_deep()
    if type(target) is list:  # a tuple is an atom, such as a bytearray, which does not keep the items
        target[0] = depth + 1


def _count_hashed(keys: list[_Value], before: int, most: int) -> int:
    """Returns how many elements hashing has read after it has hashed these keys, given that it had read `before`.

    Each key is a pair: its depth, and how many elements hashing it reads. Without keys the result is `before`. Raises
    `NotAllowedError` if the result is more than `most`.
    """
    before += len(keys)
    for key in _other_than_atoms(keys):
        before += key[1] - 1
    if before > most:
        raise NotAllowedError("a pickle with keys that would take too long to hash is not allowed")
    return before


def _too_deep() -> NotAllowedError:
    return NotAllowedError(f"a pickle that is nested more than {MAX_DEPTH} deep is not allowed; send it flattened")
