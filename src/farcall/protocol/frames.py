"""Packs and unpacks the frames that workers send each other once a link is established.

Every frame begins with 16 bytes (little-endian); what follows depends on its kind and flags:

    offset  size  contents
    0       1     kind
    1       1     flags
    2       2     length of the callee
    4       4     milliseconds that are left for the call, 0 for no limit
    8       8     call id; a reply has the id of its call
    16      ...   callee | kept reference | references | annotations | payload

    kind       flags and contents
    CALL       a call: callee, [references], [annotations], pickled arguments
    KEEP       a call whose result stays at the callee: callee, the reference of the result and the caller's fork of it
               (44), references, [annotations], pickled arguments
    RESULT     the result of a call: [references], [annotations], pickled result. With the flag IS_KEPT: the owner has
               the result of a KEEP, and sends it on request
    FAILURE    a call failed: [annotations], encoded failure. With the flag IS_CANCELLED: the call was cancelled, or its
               time was over; no contents. HAS_STARTED: its function had begun
    REFERENCES the references of a frame that was lost with its link: references
    CONTROL    messages about references (`reference_messages`)
    GOSSIP     messages about the group (`membership_messages`)
    CANCEL     the caller does not want the reply to the CALL with this id any more. There is a reply all the same; it
               may cross this frame. A KEEP is cancelled by a control message (`reference_messages`)

    references   HAS_REFERENCES: 8 number of the frame (`delivery`), 2 count, 44 each. A KEEP always has them; the count
                 may be 0
    annotations  HAS_ANNOTATIONS: 4 length, then a msgpack map of text to bytes

The *callee* of a call is

    empty                          a function by value: it is the first argument
    module, 0, name                a function by name
    1, reference and fork, name    a method of the value of a reference
    2, reference and fork          the value of a reference
    3, reference and fork          nothing; the reply is sent when the value exists
    4, reference and fork          the type of the value

Pure: bytes in, fields out. Functions that unpack raise `ProtocolError` if a frame cannot be read. Functions that pack
expect valid fields, and raise `struct.error` for a number or length that does not fit into its field.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId, new_tuple
from farcall.protocol.reference_messages import Carried

CALL: Final = 1
KEEP: Final = 2
RESULT: Final = 3
FAILURE: Final = 4
REFERENCES: Final = 5
CONTROL: Final = 6
GOSSIP: Final = 7
CANCEL: Final = 8

HAS_REFERENCES: Final = 1
HAS_ANNOTATIONS: Final = 2
IS_KEPT: Final = 4
IS_CANCELLED: Final = 8
HAS_STARTED: Final = 16

METHOD: Final = b"\1"
VALUE: Final = b"\2"
PRESENCE: Final = b"\3"
TYPE: Final = b"\4"

HEADER: Final = struct.Struct("<BBHIQ")
HEADER_SIZE: Final = HEADER.size
unpack_header: Final = HEADER.unpack_from
"""`unpack_header(frame)` returns kind, flags, length of the callee, milliseconds left and call id.

Raises `struct.error` if the frame is shorter than a header.
"""

MAX_CALLEE_BYTES: Final = 0xFFFF
MAX_REFERENCES: Final = 0xFFFF
"""The most references in one frame."""
_MAX_SECONDS: Final = 0xFFFFFFFF / 1000 - 1
_MAX_ANNOTATION_BYTES: Final = 1 << 20

_HANDLE: Final = struct.Struct("<IIQ16sIQ")
HANDLE_SIZE: Final = _HANDLE.size
"""The bytes of a reference and a fork of it."""
_SECTION: Final = struct.Struct("<QH")
SECTION_SIZE: Final = _SECTION.size
"""The bytes before the references of a frame: the number of the frame and the count."""
_LENGTH: Final = struct.Struct("<I")
_AGAIN: Final = struct.Struct("<IQ")
_pack: Final = HEADER.pack

Bytes: TypeAlias = bytes | bytearray | memoryview
Annotations: TypeAlias = Mapping[str, bytes]

_encode_annotations: Final = msgspec.msgpack.Encoder().encode
_annotations_decoder: msgspec.msgpack.Decoder[dict[str, bytes]] = msgspec.msgpack.Decoder(dict[str, bytes])


def milliseconds_left(seconds: float) -> int:
    """Returns a timeout as whole milliseconds, rounded up, for the header of a frame.

    Args:
        seconds: The timeout.

    Returns:
        The milliseconds; 0, which means no limit, if `seconds` is 0, negative, or more than 49 days.
    """
    return int(seconds * 1000) + 1 if 0 < seconds < _MAX_SECONDS else 0


def pack_call(call_id: int, callee: bytes, payload: bytes, seconds: float) -> bytes:
    """Returns a CALL frame without references and annotations. Most calls have neither.

    Args:
        call_id: The id that the reply will have.
        callee: What to run, as bytes, at most `MAX_CALLEE_BYTES`: for a function by name, its module, a zero byte and
            its name. Empty for a function that is sent by value, as the first argument. The content is not checked.
        payload: The pickled arguments.
        seconds: The seconds that are left for the call; 0 for no limit.

    Raises:
        struct.error: `call_id` or the length of `callee` does not fit into its field.
    """
    milliseconds = int(seconds * 1000) + 1 if 0 < seconds < _MAX_SECONDS else 0
    return _pack(CALL, 0, len(callee), milliseconds, call_id) + callee + payload


def pack_request(
    call_id: int, callee: bytes, payload: bytes, milliseconds: int, kept: bytes, references: bytes, annotations: bytes
) -> bytes:
    """Returns a CALL or KEEP frame. A KEEP is a call whose result stays at the callee as the value of a reference.

    Args:
        call_id: The id that the reply will have.
        callee: What to run, as bytes, at most `MAX_CALLEE_BYTES`: for a function by name, its module, a zero byte and
            its name. Empty for a function that is sent by value, as the first argument. The content is not checked.
        payload: The pickled arguments.
        milliseconds: The time that is left for the call (`milliseconds_left`); 0 for no limit.
        kept: The reference of the result and the caller's fork of it (`pack_handle`). Empty makes the frame a CALL.
        references: The result of `pack_references`. May be empty in a CALL, but not in a KEEP; this is not checked.
        annotations: The result of `pack_annotations`; empty for none.

    Raises:
        struct.error: A number or the length of `callee` does not fit into its field.
    """
    flags = (HAS_REFERENCES if references else 0) | (HAS_ANNOTATIONS if annotations else 0)
    header = _pack(KEEP if kept else CALL, flags, len(callee), milliseconds, call_id)
    return b"".join((header, callee, kept, references, annotations, payload))


def pack_reply(kind: int, call_id: int, payload: bytes) -> bytes:
    """Returns a reply without references and annotations, as most replies are. The arguments are not checked.

    Args:
        kind: RESULT or FAILURE.
        call_id: The id of the call.
        payload: The pickled result, or the encoded failure; may be empty.
    """
    return _pack(kind, 0, 0, 0, call_id) + payload


def pack_full_reply(
    kind: int, call_id: int, payload: bytes, references: bytes, annotations: bytes, is_kept: bool = False
) -> bytes:
    """Returns a reply, with or without references and annotations. The arguments are not checked.

    Args:
        kind: RESULT or FAILURE.
        call_id: The id of the call.
        payload: The pickled result, or the encoded failure; may be empty.
        references: The result of `pack_references`; empty for none.
        annotations: The result of `pack_annotations`; empty for none.
        is_kept: True to say that the callee has the result of a KEEP, and sends it on request. False if `payload` is
            the result or the failure.
    """
    flags = (HAS_REFERENCES if references else 0) | (HAS_ANNOTATIONS if annotations else 0) | (IS_KEPT * is_kept)
    return b"".join((_pack(kind, flags, 0, 0, call_id), references, annotations, payload))


def pack_message(kind: int, payload: bytes) -> bytes:
    """Returns a frame that belongs to no call.

    Args:
        kind: CONTROL, GOSSIP or REFERENCES. This is not checked.
        payload: The encoded messages or references; may be empty.
    """
    return _pack(kind, 0, 0, 0, 0) + payload


def pack_cancel(call_id: int) -> bytes:
    """Returns a CANCEL frame, by which a caller tells the callee that it does not want the result of a call any more.

    `call_id` is the id of the call. Raises `struct.error` if it does not fit into its field.
    """
    return _pack(CANCEL, 0, 0, 0, call_id)


def pack_cancelled(call_id: int, has_started: bool) -> bytes:
    """Returns the callee's reply to a call that was cancelled or has timed out: a FAILURE with the flag IS_CANCELLED.

    `call_id` is the id of the call. Raises `struct.error` if it does not fit into its field. `has_started` says whether
    the function had begun to run.
    """
    return _pack(FAILURE, IS_CANCELLED | (HAS_STARTED * has_started), 0, 0, call_id)


def pack_again(frame: bytes, seconds: float) -> bytes:
    """Returns a copy of a KEEP frame with the call id 0, to be sent again on a new connection.

    A KEEP is a call whose result stays at the callee. The copy does not have the old call id, because another call on
    the new connection may have the same id. `seconds` is the time that is left for the call; 0 for no limit. It is not
    checked that `frame` is a KEEP.
    """
    return frame[:4] + _AGAIN.pack(milliseconds_left(seconds), 0) + frame[HEADER_SIZE:]


def pack_handle(reference: RRefId, fork: ForkId) -> bytes:
    """Returns a reference and a fork of it as `HANDLE_SIZE` bytes. Raises `struct.error` if a number does not fit."""
    return _HANDLE.pack(*reference, *fork)


def unpack_handle(frame: Bytes, at: int) -> tuple[RRefId, ForkId]:
    """Returns the reference and the fork at the offset `at` of a frame.

    Raises:
        ProtocolError: The frame ends before they do.
    """
    if len(frame) < at + HANDLE_SIZE:
        raise ProtocolError("a frame that should name a reference is too short")
    named = _HANDLE.unpack_from(frame, at)
    return new_tuple(RRefId, named[:4]), new_tuple(ForkId, named[4:])


def pack_references(number: int, references: Sequence[Carried]) -> bytes:
    """Returns the references section of a frame: the handles that are inside its payload.

    Args:
        number: The number of the frame, by which the receiver notices duplicates.
        references: The references with their forks; may be empty.

    Raises:
        struct.error: A number does not fit into its field, or there are more than `MAX_REFERENCES` references.
    """
    return _SECTION.pack(number, len(references)) + b"".join([_HANDLE.pack(*each[0], *each[1]) for each in references])


def unpack_references(frame: Bytes, at: int) -> tuple[int, list[Carried], int]:
    """Reads the references section at the offset `at`.

    Returns:
        The number of the frame, the references (perhaps none), and the offset of the end of the section.

    Raises:
        ProtocolError: The frame ends before the section does.
    """
    if len(frame) < at + SECTION_SIZE:
        raise ProtocolError("a frame that should carry references is too short")
    number, count = _SECTION.unpack_from(frame, at)
    begin, end = at + SECTION_SIZE, at + SECTION_SIZE + count * HANDLE_SIZE
    if len(frame) < end:
        raise ProtocolError(f"a frame announced {count} references and does not carry as many")
    references = [
        new_tuple(Carried, (new_tuple(RRefId, named[:4]), new_tuple(ForkId, named[4:])))
        for named in _HANDLE.iter_unpack(memoryview(frame)[begin:end])
    ]
    return number, references, end


def pack_annotations(annotations: Annotations) -> bytes:
    """Returns the annotations section of a frame; empty bytes if there are no annotations.

    Raises:
        TypeError: A name is not a string, or a value is not bytes.
        ValueError: The annotations have more than 1 MiB together.
    """
    if not annotations:
        return b""
    for name, value in annotations.items():
        if not isinstance(name, str) or not isinstance(value, bytes):
            raise TypeError(f"annotations map text to bytes, not {name!r} to a {type(value).__name__}")
    packed = _encode_annotations(dict(annotations))
    if len(packed) > _MAX_ANNOTATION_BYTES:
        raise ValueError(f"the annotations of a call have {len(packed):,} bytes; at most 1 MiB is allowed")
    return _LENGTH.pack(len(packed)) + packed


def unpack_annotations(frame: Bytes, at: int) -> tuple[dict[str, bytes], int]:
    """Reads the annotations section at the offset `at` of a frame.

    Returns:
        The annotations, and the offset of the end of the section.

    Raises:
        ProtocolError: The frame ends before the section does, the section has more than 1 MiB, or it is not a map of
            text to bytes.
    """
    if len(frame) < at + _LENGTH.size:
        raise ProtocolError("a frame that should have annotations is too short")
    (length,) = _LENGTH.unpack_from(frame, at)
    begin, end = at + _LENGTH.size, at + _LENGTH.size + length
    if length > _MAX_ANNOTATION_BYTES or len(frame) < end:
        raise ProtocolError(f"a frame announced {length} bytes of annotations, which cannot be")
    try:
        return _annotations_decoder.decode(memoryview(frame)[begin:end]), end
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the annotations of a frame cannot be read: {error}") from None
