"""What is measured and how much of it, and how a user says so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from farcall.errors import UsageError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
_SIZE: Final = re.compile(r"(\d+)\s*(B|KIB|MIB|GIB)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": 1 << 30}

PARTS: Final = ("payload", "exchange", "in-flight", "threads", "streaming", "references", "startup")
"""What a run is made of: each is a turn of each system in each round."""


@dataclass(frozen=True)
class Effort:
    """How much is measured. Each point ends after `seconds` or its number of calls, whichever comes first."""

    rounds: int = 3
    parts: tuple[str, ...] = PARTS
    sizes: tuple[int, ...] = (0, 64, KIB, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    """Of payloads, in bytes."""
    windows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    """Calls in flight."""
    threads: tuple[int, ...] = (1, 4, 16)
    """That call at once."""
    streamed: tuple[int, ...] = (256 * MIB,)
    """Bytes of the arrays that are sent all the time while no-ops are timed."""
    workers: tuple[int, ...] = (1, 2, 4, 8, 16)
    """That are started."""
    seconds: float = 2.0
    echoes: int = 2_000
    warmup: int = 200
    calls: int = 10_000
    references: int = 5_000
    quick: bool = False
    """Whether it is only enough to see that everything works."""


QUICK: Final = Effort(
    rounds=1,
    sizes=(0, KIB, 64 * KIB, MIB, 16 * MIB),
    windows=(1, 8, 64),
    threads=(1, 4),
    streamed=(16 * MIB,),
    workers=(1, 2),
    seconds=0.3,
    echoes=300,
    warmup=30,
    calls=2_000,
    references=500,
    quick=True,
)
"""Some seconds; figures not to be believed."""


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes of a list such as `0,64,4KiB,1MiB`, in order. Raises `UsageError`."""
    sizes = set()
    for word in text.split(","):
        match = _SIZE.fullmatch(word.strip())
        if not match:
            raise UsageError(f"--sizes: {word.strip()!r} is no size; write them as 0,64,4KiB,1MiB")
        sizes.add(int(match[1]) * _UNITS[(match[2] or "").upper()])
    return tuple(sorted(sizes))


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """The numbers of a list such as `1,2,8`, each at least 1, in order. Raises `UsageError`."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise UsageError(f"{option}: {word!r} is not a number of at least 1; write them as 1,2,8")
    return tuple(sorted({int(word) for word in words}))


def parse_parts(text: str) -> tuple[str, ...]:
    """Some of `PARTS`, in their order. Raises `UsageError`."""
    words = {word.strip() for word in text.split(",")}
    if unknown := sorted(words - set(PARTS)):
        raise UsageError(f"--measure: there is no {', '.join(map(repr, unknown))}; there are {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in words)
