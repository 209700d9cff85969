"""The types of message fields, which limit every number and every length; and how text of other workers is displayed.

A decoder with these types refuses a wrong message as a whole, before any part of it is used. The characters of names
are checked separately (`check_name`), because a type cannot express that.

Pure, as all of `protocol`.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from farcall.errors import ProtocolError
from farcall.protocol.ranges import LARGEST

MAX_NAME: Final = 255
"""The most characters of a worker's name. `init_rpc` has the same limit."""
_MAX_TEXT: Final = 4096
_MAX_ADDRESSES: Final = 64
_MAX_QUOTE: Final = 1000

WorkerNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=LARGEST)]
"""-1 for a worker without a rank."""
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]
Addresses: TypeAlias = Annotated[tuple[Text, ...], msgspec.Meta(max_length=_MAX_ADDRESSES)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Token: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=256)]
Digest: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""It needs no upper limit, because msgpack has no integers of more than 64 bits."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0)]
"""Infinity is allowed. NaN is refused, because it is not greater than or equal to 0."""


def quoted(text: str, longest: int = _MAX_QUOTE) -> str:
    """Returns text of another worker in a form that is safe in a log line or an error message. Raises nothing.

    Unprintable characters, such as line breaks and terminal escapes, are replaced by their Python escapes.

    Args:
        text: The text; empty text stays empty.
        longest: The most characters of `text` to show. Longer text is cut there, and `...` is added.
    """
    clipped = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in clipped)


def check_name(name: str, what: str = "the name of a worker") -> None:
    """Checks that all characters of a name are printable. Empty text passes, and the length is not checked.

    Args:
        name: The name.
        what: How the error message calls the name.

    Raises:
        ProtocolError: The name has unprintable characters.
    """
    if not name.isprintable():
        raise ProtocolError(f"{what} must be printable, and {quoted(name)!r} is not")
