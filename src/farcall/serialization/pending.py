"""What stands for a value while its pickle is read, until its state has come and it can be made at once, and checked.

Pickle makes an empty value first and sets its state after. Where a state that nobody has checked could do harm, the
unpickler is given one of these instead. A pending value can be used for nothing, and is finished once.
"""

from __future__ import annotations

from typing import Any


class Pending:
    """A value that is still to be made."""

    __slots__ = ("finished",)

    def __init__(self) -> None:
        self.finished: Any = None
        """The value, once it is made."""

    def finish(self, state: Any) -> Any:
        """The value of that state. Raises `TypeError`, `ValueError`, `LookupError` if there is none, or was one."""
        if self.finished is not None:
            raise TypeError("it was given two states")
        self.finished = self._made(state)
        return self.finished

    def _made(self, state: Any) -> Any:
        raise NotImplementedError
