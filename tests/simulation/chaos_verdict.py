"""What the workers of the chaos test have written down, and whether it may be so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from simulation.chaos_child import Child

FAIR: Final = frozenset({"WorkerLostError", "OwnerLostError", "ReferenceRefusedError", "UnknownWorkerError"})
"""Errors that any call may end with. The last one if it led through a worker that had not heard of the next one yet."""
FAREWELL: Final = frozenset({"NotInitializedError", "RpcError"})
"""... and one that a worker makes which is about to be gone: it left while a function still ran there for others."""
EXPELLED: Final = frozenset({"ExpelledError"})
CANCELLED: Final = frozenset({"CallCancelledError", "CancelledError", "RpcTimeoutError"})
"""... and one that is made to be cancelled."""
NESTED: Final = frozenset({"CallCancelledError", "CancelledError"})
"""... and one that a function makes for a worker that is lost meanwhile, or whose connection is."""


class Verdict(NamedTuple):
    """What there was."""

    calls: Counter[str]
    errors: Counter[str]
    findings: list[str]


def judge(children: Iterable[Child], excused: set[tuple[str, int]]) -> Verdict:
    """Reads all that the workers wrote. `excused`: name and number of those who may have been taken for dead."""
    children = list(children)
    verdict = Verdict(Counter(), Counter(), [])
    names = {child.name for child in children}
    frozen = {child.name for child in children if child.fate == "frozen"}
    ran: Counter[str] = Counter()
    for child in children:
        open_calls: set[str] = set()
        for words in _notes(child):
            match words:
                case ["call", call_id]:
                    open_calls.add(call_id)
                case ["end", call_id, outcome, *text]:
                    open_calls.discard(call_id)
                    _count(verdict, child, call_id, outcome, " ".join(text), names, frozen - {child.name})
                case ["ran", call_id]:
                    ran[call_id] += 1
                case ["hung", call_id]:
                    verdict.findings.append(f"{child} went on with call {call_id}, which nobody waited for")
                case ["lost", name, number]:
                    # Who was frozen itself cannot know who has left meanwhile, and why.
                    if (name, int(number)) not in excused and child.fate != "frozen":
                        verdict.findings.append(f"{child} took {name} (number {number}) for dead, who was not")
        if open_calls and child.fate != "killed":
            verdict.findings.append(f"{child}: calls that never ended: {sorted(open_calls)[:5]}")
        verdict.calls["of workers that were killed"] += len(open_calls)
        if "Traceback" in child.last_words() and child.fate != "killed":
            verdict.findings.append(f"{child} wrote a traceback: {child.last_words()}")
    verdict.findings.extend(f"call {call_id} ran {times} times" for call_id, times in ran.items() if times > 1)
    verdict.calls["functions run"] = ran.total()
    return verdict


def _count(
    verdict: Verdict, child: Child, call_id: str, outcome: str, text: str, names: set[str], frozen: set[str]
) -> None:
    """`frozen`: the names of other workers that were stopped for long."""
    verdict.calls["ended"] += 1
    if outcome == "right":
        verdict.calls["with their own result"] += 1
        return
    if outcome in {"c": CANCELLED, "i": NESTED}.get(call_id[-1], frozenset()):
        verdict.calls["cancelled"] += 1
        return
    if outcome == "wrong":
        verdict.findings.append(f"call {call_id} of {child} got what was not its own: {text}")
        return
    verdict.errors[outcome] += 1
    fair = FAIR | {"frozen": EXPELLED | FAREWELL, "leaves": FAREWELL}.get(child.fate, frozenset())
    if any(f"worker {name!r} (this one) was declared lost" in text for name in frozen):
        fair |= EXPELLED  # the call led through one that woke up, and tells what it ran into itself
    if outcome not in fair:
        verdict.findings.append(f"call {call_id} of {child} ended with {outcome}: {text}")
    elif not any(name in names for name in re.findall(r"'(\w+)'", text)):
        verdict.findings.append(f"call {call_id} of {child} ended with an error that names nobody: {outcome}: {text}")


def _notes(child: Child) -> Iterator[list[str]]:
    if child.files.notes.exists():
        for line in child.files.notes.read_text(errors="replace").splitlines():
            yield line.split(" ")
