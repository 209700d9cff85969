"""The exception tree: the drawing at the head of the module is the truth, and the classes agree with it."""

from __future__ import annotations

import copy
import inspect
import pickle
import pkgutil
import re
from typing import NamedTuple

import pytest

import farcall
from farcall import errors


class Drawn(NamedTuple):
    """One line of the drawing."""

    name: str
    parent: str | None
    builtin: str | None


LINE = re.compile(r"^ {4}(?P<branches>[│├└─ ]*)(?P<name>[A-Z]\w+)(?:\s*\((?P<builtin>[\w.]+(?:Error|Group))\))? +\S")


def drawing() -> list[Drawn]:
    assert errors.__doc__ is not None
    drawn: list[Drawn] = []
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        if match := LINE.match(line):
            depth, rest = divmod(len(match["branches"]), 4)
            assert rest == 0, line
            assert depth <= len(path), line
            del path[depth:]
            drawn.append(Drawn(match["name"], path[-1] if path else None, match["builtin"]))
            path.append(match["name"])
    return drawn


CLASSES: dict[str, type[Exception]] = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and value.__name__ == name
}

RPC_ERRORS = {name: error for name, error in CLASSES.items() if issubclass(error, errors.RpcError)}


def test_every_class_is_drawn_and_every_drawn_class_is_there() -> None:
    names = [drawn.name for drawn in drawing()]
    assert sorted(names) == sorted(CLASSES)


@pytest.mark.parametrize("drawn", drawing(), ids=lambda drawn: drawn.name)
def test_the_classes_stand_where_they_are_drawn(drawn: Drawn) -> None:
    bases = [CLASSES[drawn.parent]] if drawn.parent else []
    bases += [pkgutil.resolve_name(f"builtins.{drawn.builtin}")] if drawn.builtin and "." not in drawn.builtin else []
    bases += [pkgutil.resolve_name(drawn.builtin)] if drawn.builtin and "." in drawn.builtin else []
    assert CLASSES[drawn.name].__bases__ == tuple(bases)


def test_the_root_is_what_programs_for_torch_catch() -> None:
    assert drawing()[0] == Drawn("RpcError", None, "RuntimeError")
    assert CLASSES.keys() - RPC_ERRORS.keys() == {"GroupCallError"}  # it holds errors of the program


def test_every_name_ends_in_error_and_the_earlier_names_mean_the_same() -> None:
    assert [name for name in CLASSES if not name.endswith("Error")] == []
    aliases = {name: value.__name__ for name, value in vars(errors).items() if inspect.isclass(value)}
    assert {old: new for old, new in aliases.items() if old not in CLASSES} == {
        "WorkerLost": "WorkerLostError",
        "OwnerLost": "OwnerLostError",
        "ReferenceRefused": "ReferenceRefusedError",
        "ConnectionRefusedByPeer": "PeerRefusedError",
    }
    assert farcall.WorkerLost is farcall.WorkerLostError
    assert farcall.ConnectionRefusedByPeer is farcall.PeerRefusedError


@pytest.mark.parametrize("error", CLASSES.values(), ids=CLASSES)
def test_every_class_is_documented(error: type[errors.RpcError]) -> None:
    assert error.__doc__
    assert error.__module__ == "farcall.errors"


@pytest.mark.parametrize("error", RPC_ERRORS.values(), ids=RPC_ERRORS)
def test_the_message_is_the_text(error: type[errors.RpcError]) -> None:
    assert str(error("who, what, and what to do")) == "who, what, and what to do"


def test_what_an_error_knows_beside_its_message() -> None:
    assert errors.WorkerLostError("gone", "b").worker == "b"
    assert errors.WorkerLostError("gone").worker is None
    assert errors.RendezvousTimeoutError("late", ("join/0",)).present == ("join/0",)
    assert errors.RendezvousTimeoutError("late").present == ()
    remote = errors.RemoteError("text", "pkg.Odd", "odd", "Traceback ...")
    assert (remote.type_name, remote.message, remote.traceback) == ("pkg.Odd", "odd", "Traceback ...")
    plain = errors.RemoteError("text")
    assert (plain.type_name, plain.message, plain.traceback) == ("", "", "")


@pytest.mark.parametrize("clone", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
@pytest.mark.parametrize(
    "error",
    [
        *(cls("text") for cls in RPC_ERRORS.values()),
        errors.WorkerLostError("gone", "b"),
        errors.RendezvousTimeoutError("late", ("join/0", "join/1")),
        errors.RemoteError("text", "pkg.Odd", "odd", "Traceback ..."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel(error: errors.RpcError, clone: object) -> None:
    assert callable(clone)
    twin = clone(error)
    assert type(twin) is type(error)
    assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))
