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
"""A size of the option `--sizes`: a number and an optional unit, in upper or lower case."""
_UNITS: Final = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": 1 << 30}
"""How many bytes each unit of a size has."""

PARTS: Final = ("payload", "exchange", "in-flight", "threads", "streaming", "references", "startup")
"""The parts of a run. In each round, each system has one turn (its processes are started, measured and ended) for each
part.
"""


@dataclass(frozen=True)
class Effort:
    """What to measure, and how much of it. The defaults are a full run of `farcall bench`.

    Each part of a run is measured at *points*: payload sizes, or numbers of calls, threads or workers. The measurement
    of a point ends after `seconds` or its largest number of calls, whichever comes first. The values are not checked.

    Attributes:
        rounds: How many times everything is measured.
        parts: The parts of the run that are measured. Each is one of `PARTS`.
        sizes: Payload sizes in bytes, for "payload" and "exchange".
        windows: Numbers of calls in flight, for "in-flight".
        threads: Numbers of threads that call at the same time, for "threads".
        streamed: Sizes in bytes of the arrays that are sent all the time while no-op calls are timed, for "streaming".
        workers: Numbers of workers to start, for "startup".
        seconds: About how many seconds a point is measured at most. "startup" has no such limit.
        echoes: The largest number of calls at each point of "payload" and "exchange".
        warmup: The largest number of untimed calls before the timed calls of "payload", "exchange" and "references".
        calls: The largest number of calls at each point of "in-flight".
        references: The largest number of references that "references" creates.
        quick: True if the run only shows that everything works.
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

    A unit is B, KiB, MiB or GiB, in upper or lower case; without a unit the number is in bytes. Raises `UsageError` if
    a word is not a size, also for an empty text.
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

    Raises `UsageError` if a word is not a whole number of at least 1, also for an empty text. The message begins with
    `option`, the name of the command-line option, such as `--start`.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise UsageError(f"{option}: {word!r} is not a whole number of at least 1; write numbers like 1,2,8")
    return tuple(sorted({int(word) for word in words}))


def parse_parts(text: str) -> tuple[str, ...]:
    """Returns the parts of a run in a list such as `payload,startup`, in the order of `PARTS` and without duplicates.

    Raises `UsageError`, which lists the known parts, for any other word, also for an empty text.
    """
    words = {word.strip() for word in text.split(",")}
    if unknown := sorted(words - set(PARTS)):
        raise UsageError(f"--measure: {', '.join(map(repr, unknown))} does not exist; choose from {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in words)


def make_effort(arguments: argparse.Namespace) -> Effort:
    """Returns the effort that the options of `farcall bench` ask for: what to measure, and how much of it.

    Args:
        arguments: The parsed options. `quick` chooses `QUICK` instead of a full run. `rounds`, `measure` (the parts),
            `sizes`, `in_flight` and `start` (the numbers of workers) replace one value each; None leaves it.

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
