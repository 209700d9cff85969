"""What to measure and how much of it, and the command-line options that say so."""

from __future__ import annotations

import argparse
import dataclasses
import re
from dataclasses import dataclass
from typing import Final

from farcall.errors import UsageError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
_SIZE: Final = re.compile(r"(\d+)\s*(B|KIB|MIB|GIB)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": 1 << 30}

PARTS: Final = ("payload", "exchange", "in-flight", "threads", "streaming", "references", "startup")
"""The parts of a run: each system has one turn for each part in each round."""


@dataclass(frozen=True)
class Effort:
    """How much to measure. A point ends after `seconds` or its number of calls, whichever comes first.

    `rounds` is how often everything is measured, `parts` which parts of the run are (see `PARTS`). `echoes`, `calls`
    and `references` are the largest numbers of calls of a point, by part; `warmup` calls before them do not count.
    """

    rounds: int = 3
    parts: tuple[str, ...] = PARTS
    sizes: tuple[int, ...] = (0, 64, KIB, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    """Payload sizes in bytes."""
    windows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    """Numbers of calls in flight."""
    threads: tuple[int, ...] = (1, 4, 16)
    """Numbers of threads that call at the same time."""
    streamed: tuple[int, ...] = (256 * MIB,)
    """Sizes in bytes of the arrays that are sent all the time while no-op calls are timed."""
    workers: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of workers to start."""
    seconds: float = 2.0
    echoes: int = 2_000
    warmup: int = 200
    calls: int = 10_000
    references: int = 5_000
    quick: bool = False
    """True if the run only shows that everything works."""


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
"""A run of some seconds, whose figures are not reliable."""


def parse_sizes(text: str) -> tuple[int, ...]:
    """Returns the sizes in a list such as `0,64,4KiB,1MiB`, in bytes, sorted and without duplicates.

    Raises `UsageError` if a word is not a size, also for an empty text.
    """
    sizes = set()
    for word in text.split(","):
        match = _SIZE.fullmatch(word.strip())
        if not match:
            raise UsageError(f"--sizes: {word.strip()!r} is not a size; write sizes like 0,64,4KiB,1MiB")
        sizes.add(int(match[1]) * _UNITS[(match[2] or "").upper()])
    return tuple(sorted(sizes))


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Returns the numbers in a list such as `1,2,8`, sorted and without duplicates.

    Raises `UsageError`, which names `option`, if a word is not a whole number of at least 1.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise UsageError(f"{option}: {word!r} is not a whole number of at least 1; write numbers like 1,2,8")
    return tuple(sorted({int(word) for word in words}))


def parse_parts(text: str) -> tuple[str, ...]:
    """Returns the parts in a list such as `payload,startup`, in the order of `PARTS` and without duplicates.

    Raises `UsageError`, which lists the known parts, for any other word, also for an empty text.
    """
    words = {word.strip() for word in text.split(",")}
    if unknown := sorted(words - set(PARTS)):
        raise UsageError(f"--measure: {', '.join(map(repr, unknown))} does not exist; choose from {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in words)


def make_effort(arguments: argparse.Namespace) -> Effort:
    """Returns the effort that the options of `farcall bench` ask for.

    Args:
        arguments: The parsed options: quick, rounds, measure, sizes, in_flight and start. None leaves a default.

    Raises:
        UsageError: An option has an invalid value; the message names the option.
    """
    effort = QUICK if arguments.quick else Effort()
    if arguments.rounds is not None:
        if arguments.rounds < 1:
            raise UsageError(f"--rounds must be at least 1, not {arguments.rounds}")
        effort = dataclasses.replace(effort, rounds=arguments.rounds)
    if arguments.measure is not None:
        effort = dataclasses.replace(effort, parts=parse_parts(arguments.measure))
    if arguments.sizes is not None:
        effort = dataclasses.replace(effort, sizes=parse_sizes(arguments.sizes))
    if arguments.in_flight is not None:
        effort = dataclasses.replace(effort, windows=parse_counts("--in-flight", arguments.in_flight))
    if arguments.start is not None:
        effort = dataclasses.replace(effort, workers=parse_counts("--start", arguments.start))
    return effort
