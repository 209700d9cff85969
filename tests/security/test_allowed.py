"""Which names are on a list, and which are not though they look like it."""

from __future__ import annotations

import operator
import os
import random
import sys
from typing import Any

import pytest

import farcall
import service_stage
from farcall.errors import NotAllowedError, UsageError
from farcall.functions import exposed
from farcall.options import RpcBackendOptions
from farcall.security import allowed as allowed_module
from farcall.security.allowed import AllowList

HERE = service_stage.__name__


def may_call(allowed: AllowList, name: str, module: str = HERE) -> bool:
    try:
        allowed.check_function(module, name)
    except NotAllowedError:
        return False
    return True


def may_use(allowed: AllowList, name: str, found: object, module: str = HERE) -> bool:
    try:
        allowed.check_name(module, name)
        allowed.check_found(module, name, found)
    except NotAllowedError:
        return False
    return True


@pytest.mark.parametrize(
    ("entry", "name", "yes"),
    [
        (HERE, "predict", True),
        (HERE, "Model.step", True),
        (HERE, "_private", False),
        (HERE, "Model.__init__", False),
        (f"{HERE}._private", "_private", True),
        (f"{HERE}.predict", "predict", True),
        (f"{HERE}.predict", "predicted", False),
        (f"{HERE}.pre*", "predict", True),
        (f"{HERE}.pre*", "system", False),
        (f"{HERE}.predic?", "predict", True),
        (f"{HERE}.[mp]*", "predict", True),
        ("*", "predict", True),
        (HERE[:-1], "predict", False),
        ("os", "predict", False),
    ],
)
def test_names_and_patterns(entry: str, name: str, yes: bool) -> None:
    assert may_call(AllowList([entry]), name) is yes


def test_what_is_marked_is_allowed_and_nothing_is_imported_to_look() -> None:
    nothing = AllowList([])
    assert may_call(nothing, "marked")
    assert may_call(nothing, "Marked")
    assert may_call(nothing, "Marked.step")
    assert may_call(nothing, "Partly.open")
    assert not may_call(nothing, "Partly.closed")
    assert not may_call(nothing, "predict")
    assert not may_call(nothing, "Marked.__init__")
    assert not may_call(nothing, "marked.__globals__")
    sys.modules.pop("antigravity", None)
    assert not may_call(nothing, "fly", module="antigravity")
    assert "antigravity" not in sys.modules


def test_what_a_module_has_from_elsewhere_is_not_its_own() -> None:
    whole = AllowList([HERE])
    assert may_use(whole, "predict", service_stage.predict)
    assert not may_use(whole, "system", service_stage.system)
    assert not may_use(whole, "run", service_stage.run)
    assert not may_use(whole, "os", os)
    assert may_use(AllowList([f"{HERE}.run"]), "run", service_stage.run), "unless it is on the list by that very name"
    assert not may_use(AllowList([f"{HERE}.os"]), "os", os), "but a module is nothing to be sent"
    with pytest.raises(
        NotAllowedError,
        match=r"uses of the module `service_stage.os` are not allowed on worker 'w'; name a function or class of it",
    ):
        AllowList([f"{HERE}.os"], "w").check_found(HERE, "os", os)


@pytest.mark.parametrize(
    "found",
    [random.random, random.choice, {}.update, [].append, str.upper, dict.fromkeys, (1).__add__, operator.itemgetter(0)],
)
def test_methods_of_builtins_are_not_the_module_s_own(found: object) -> None:
    assert not may_use(AllowList([HERE]), "anything", found)
    assert may_use(AllowList([f"{HERE}.anything"]), "anything", found), "unless that very name is on the list"


def test_plain_data_may_be_loaded_and_is_no_function() -> None:
    nothing = AllowList([])
    assert may_use(nothing, "set", set, module="builtins")
    assert may_use(nothing, "ValueError", ValueError, module="builtins")
    assert not may_call(nothing, "set", module="builtins")
    for name in ("eval", "exec", "getattr", "__import__", "open", "compile"):
        assert not may_use(nothing, name, None, module="builtins")


@pytest.mark.parametrize(
    ("entries", "value", "name", "yes"),
    [
        ([HERE], service_stage.Model(), "step", True),
        ([f"{HERE}.Model"], service_stage.Model(), "step", True),
        ([f"{HERE}.Model.step"], service_stage.Model(), "step", True),
        ([f"{HERE}.Model.step"], service_stage.Model(), "helper", False),
        ([HERE], service_stage.Model(), "_tune", False),
        ([HERE], service_stage.Model(), "__reduce_ex__", False),
        ([f"{HERE}.Model._tune"], service_stage.Model(), "_tune", True),
        ([], service_stage.Marked(), "step", True),
        ([], service_stage.Partly(), "open", True),
        ([], service_stage.Partly(), "closed", False),
        ([], [], "append", False),
        (["builtins.list"], [], "append", True),
    ],
)
def test_methods_by_the_class_of_their_value(entries: list[str], value: object, name: str, yes: bool) -> None:
    allowed = AllowList(entries)
    if yes:
        allowed.check_method(value, name)
        return
    with pytest.raises(NotAllowedError, match=rf"\.{name}`.*farcall\.exposed"):
        allowed.check_method(value, name)


def test_the_option_takes_things_and_names() -> None:
    options = RpcBackendOptions(allow=[service_stage, service_stage.predict, service_stage.Model, "service.*"])  # type: ignore[arg-type]
    assert options.allow == (HERE, f"{HERE}.predict", f"{HERE}.Model", "service.*")
    assert options.frozen_copy().allow == options.allow
    assert RpcBackendOptions().allow is None


@pytest.mark.parametrize(
    "wrong",
    [
        "service",
        3,
        [lambda: 0],
        [3],
        [""],
        [" service"],
        ["service."],
        [".x"],
        ["a..b"],
        ["service.[a"],
        ["service.a]"],
        ["a[]"],
        ["a b"],
    ],
)
def test_the_option_refuses_what_is_no_name(wrong: object) -> None:
    with pytest.raises(UsageError, match="allow"):
        RpcBackendOptions(allow=wrong)  # type: ignore[arg-type]


def test_the_option_takes_every_pattern_that_may_match() -> None:
    patterns = ("*", "service.*", "service.get_?", "service.step[0-9]", "service.[!_]*", "service.[ab][cd].*", "a-b.c")
    assert RpcBackendOptions(allow=patterns).allow == patterns
    assert may_call(AllowList(["service_stage.pre[a-d]ict"]), "predict")


class MarkedInEveryWay:
    @exposed()
    def with_parentheses(self) -> None: ...

    @exposed
    @staticmethod
    def above() -> None: ...

    @staticmethod
    @exposed
    def beneath() -> None: ...

    @exposed()
    @classmethod
    def of_the_class(cls) -> None: ...

    @staticmethod
    def not_at_all() -> None: ...


def test_the_mark_may_stand_above_and_have_parentheses() -> None:
    value, nothing = MarkedInEveryWay(), AllowList([])
    for name in ("with_parentheses", "above", "beneath", "of_the_class"):
        nothing.check_method(value, name)
        assert may_call(nothing, f"MarkedInEveryWay.{name}", __name__)
    with pytest.raises(NotAllowedError):
        nothing.check_method(value, "not_at_all")


def test_only_what_can_carry_the_mark_is_marked() -> None:
    def own() -> None: ...

    assert exposed(own) is own
    assert farcall.exposed is exposed
    with pytest.raises(TypeError, match="cannot be marked"):
        exposed(len)


def test_edges_have_functions_that_may_always_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_module, "_INTERNAL_FUNCTIONS", set())
    name = test_edges_have_functions_that_may_always_be_called.__name__
    with pytest.raises(NotAllowedError):
        AllowList(["other"]).check_function(__name__, name)
    allowed_module.register_internal_function(test_edges_have_functions_that_may_always_be_called)
    AllowList(["other"]).check_function(__name__, name)


class Text(str):
    """Counts how often a part of it is taken."""

    taken = 0

    def __getitem__(self, key: Any) -> str:
        Text.taken += 1
        return super().__getitem__(key)


def test_a_name_of_many_parts_is_not_compared_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = AllowList(["service.get", "s"])
    monkeypatch.setattr(Text, "taken", 0)
    for refused in (Text("x" + ".a" * 10_000), Text("service.getting" + ".a" * 10_000)):
        with pytest.raises(NotAllowedError):
            allowed.check_listed(refused)
    assert Text.taken < 20
    for listed in ("service.get" + ".a" * 10_000, "s" + ".a" * 10_000, "service.get", "s.a", "s"):
        allowed.check_listed(listed)
