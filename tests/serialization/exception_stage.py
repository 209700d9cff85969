"""Exceptions that are raised, travel, and are shown."""

from __future__ import annotations

import traceback
from typing import Any

from farcall.serialization import decode_failure, encode_failure


def travel(error: BaseException, worker: str = "worker1", function: str = "train") -> Any:
    return decode_failure(encode_failure(error, worker, function))


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class OtherArguments(ValueError):
    def __init__(self, first: str, second: int) -> None:
        super().__init__(f"{first}-{second}")
        self.first, self.second = first, second
