"""Reference messages and carried handles as bytes.

    control body    8    up to which number the sender has got the receiver's messages (an acknowledgement)
                    then for each message: 8 its number, 1 its kind, 28 reference and fork
    section         8    the number of the message that carries the handles
                    2    how many handles it carries
                    28×n reference and fork of each
    reference       4 owner, 4 creator, 8 number
    and fork        4 creator, 8 number

All little-endian. A section stands at the front of a message's head. Pure: bytes in, messages out; what cannot be read
raises `ProtocolError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId, new_tuple
from farcall.protocol.reference_messages import (
    Carried,
    ChildAccepted,
    CreateRequest,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    Message,
    UserDeleted,
)
from farcall.protocol.wire import HEADER, REMOTE

_KINDS: Final[tuple[type[Message], ...]] = (
    CreateRequest,
    ForkRequest,
    ForkAccepted,
    ForkRefused,
    ChildAccepted,
    UserDeleted,
)
_CODES: Final = {kind: code for code, kind in enumerate(_KINDS)}
CHILD_ACCEPTED: Final = _CODES[ChildAccepted]
USER_DELETED: Final = _CODES[UserDeleted]

_ACKNOWLEDGEMENT: Final = struct.Struct("<Q")
_ENTRY: Final = struct.Struct("<QBIIQIQ")
_SECTION: Final = struct.Struct("<QH")
_HANDLE: Final = struct.Struct("<IIQIQ")
_REMOTE: Final = struct.Struct("<QHIIQIQ")
REMOTE_SIZE: Final = _REMOTE.size
"""Of the head of a remote call without handles, up to the callee."""
_pack_one: Final = _REMOTE.pack
unpack_remote_start: Final = _REMOTE.unpack_from
"""`unpack_remote_start(head)`: number, how many handles, and if these are none the reference and the fork."""
pack_frame: Final = struct.Struct(HEADER.format + _REMOTE.format[1:]).pack
"""What stands in front of the callee in a remote call, see `encode_remote`; for who makes one without its frame."""
HANDLE_SIZE: Final = _HANDLE.size
unpack_reference: Final = struct.Struct("<IIQ").unpack_from
"""`unpack_reference(head, at)`: the reference of a handle in a head, as a plain tuple, which is equal to its `RRefId`.
Bound to struct's own method: raises `struct.error`."""
SECTION_SIZE: Final = _SECTION.size
"""Without the handles."""
MOST_HANDLES: Final = 0xFFFF
"""So many can one message carry."""


def pack_control(acknowledged: int, messages: Sequence[tuple[int, Message]]) -> bytes:
    """An acknowledgement and numbered messages."""
    parts = [_ACKNOWLEDGEMENT.pack(acknowledged)]
    codes, pack = _CODES, _ENTRY.pack
    for number, message in messages:
        reference, fork = message
        parts.append(pack(number, codes[type(message)], *reference, *fork))
    return b"".join(parts)


Entry: TypeAlias = tuple[int, int, int, int, int, int, int]
"""A message as it stands there: its number, its kind, owner, creator and number of the reference, and the fork's."""


def unpack_entries(body: bytes | bytearray | memoryview) -> tuple[int, list[Entry]]:
    """The acknowledgement, and the messages as they stand there. Raises `ProtocolError`."""
    size = len(body) - _ACKNOWLEDGEMENT.size
    if size < 0 or size % _ENTRY.size:
        raise ProtocolError(f"a control message of {len(body)} bytes came, which cannot be")
    (acknowledged,) = _ACKNOWLEDGEMENT.unpack_from(body)
    if not size:
        return acknowledged, []
    entries: list[Entry] = list(_ENTRY.iter_unpack(memoryview(body)[_ACKNOWLEDGEMENT.size :]))
    for entry in entries:
        if entry[1] >= len(_KINDS):
            raise ProtocolError(f"a control message of unknown kind {entry[1]} came")
    return acknowledged, entries


def message_of(code: int, reference: tuple[int, int, int], fork: tuple[int, int]) -> Message:
    """The message of that kind about these."""
    return new_tuple(_KINDS[code], (new_tuple(RRefId, reference), new_tuple(ForkId, fork)))  # type: ignore[no-any-return]


def unpack_control(body: bytes | bytearray | memoryview) -> tuple[int, list[tuple[int, Message]]]:
    """The acknowledgement and the numbered messages. Raises `ProtocolError`."""
    acknowledged, entries = unpack_entries(body)
    return acknowledged, [(number, message_of(code, named[:3], named[3:])) for number, code, *named in entries]  # type: ignore[arg-type]


def pack_section(number: int, handles: Sequence[Carried]) -> bytes:
    """The front of the head of a message that carries handles, at most `MOST_HANDLES`. Does not fail."""
    if len(handles) == 1:
        ((owner, creator, place), (fork_creator, fork_number)) = handles[0]
        return _pack_one(number, 1, owner, creator, place, fork_creator, fork_number)
    return _SECTION.pack(number, len(handles)) + b"".join([pack_handle(*handle) for handle in handles])


def pack_remote(number: int, handles: Sequence[Carried], reference: RRefId, fork: ForkId) -> bytes:
    """The front of the head of a remote call: the section, the reference to make, and the caller's fork of it."""
    return pack_section(number, handles) + pack_handle(reference, fork)


def encode_remote(call_id: int, number: int, reference: RRefId, fork: ForkId, callee: bytes, body: bytes) -> bytes:
    """A whole remote call without handles and buffers: as `wire.encode` of what `pack_remote` gives, in fewer steps."""
    owner, creator, place = reference
    fork_creator, fork_number = fork
    size = REMOTE_SIZE + len(callee)
    start = pack_frame(
        REMOTE, 0, 0, size, len(body), call_id, number, 0, owner, creator, place, fork_creator, fork_number
    )
    return start + callee + body


def unpack_remote(head: bytes) -> tuple[int, list[Carried], RRefId, ForkId, bytes]:
    """What `pack_remote` has packed, and the rest of the head. Raises `ProtocolError`."""
    if len(head) >= REMOTE_SIZE:
        number, count, owner, creator, place, fork_creator, fork_number = unpack_remote_start(head)
        if not count:
            reference, fork = new_tuple(RRefId, (owner, creator, place)), new_tuple(ForkId, (fork_creator, fork_number))
            return number, [], reference, fork, head[REMOTE_SIZE:]
    number, carried, rest = unpack_section(head)
    return number, carried, *unpack_handle(rest)


def unpack_section(head: bytes) -> tuple[int, list[Carried], bytes]:
    """The message's number, the handles it carries, and the rest of the head. Raises `ProtocolError`."""
    if len(head) >= REMOTE_SIZE:
        number, count, owner, creator, place, fork_creator, fork_number = unpack_remote_start(head)
        if count == 1:
            named = new_tuple(RRefId, (owner, creator, place)), new_tuple(ForkId, (fork_creator, fork_number))
            return number, [new_tuple(Carried, named)], head[REMOTE_SIZE:]
    if len(head) < _SECTION.size:
        raise ProtocolError("a message that should carry references has no place for them")
    number, count = _SECTION.unpack_from(head)
    end = _SECTION.size + count * HANDLE_SIZE
    if len(head) < end:
        raise ProtocolError(f"a message announced {count} references, but does not carry as many")
    handles = [
        new_tuple(Carried, (new_tuple(RRefId, (owner, creator, count)), new_tuple(ForkId, (fork_creator, fork_number))))
        for owner, creator, count, fork_creator, fork_number in _HANDLE.iter_unpack(head[_SECTION.size : end])
    ]
    return number, handles, head[end:]


def pack_handle(reference: RRefId, fork: ForkId) -> bytes:
    """A reference and a fork."""
    return _HANDLE.pack(*reference, *fork)


def unpack_handle(head: bytes) -> tuple[RRefId, ForkId, bytes]:
    """The reference and fork at the front of a head, and the rest of it. Raises `ProtocolError`."""
    if len(head) < HANDLE_SIZE:
        raise ProtocolError("a message about a reference does not say which")
    owner, creator, number, fork_creator, fork_number = _HANDLE.unpack_from(head)
    return RRefId(owner, creator, number), ForkId(fork_creator, fork_number), head[HANDLE_SIZE:]
