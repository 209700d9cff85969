from __future__ import annotations

import collections
import functools
import importlib
import math
import os.path
import sys
import weakref
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from farcall.errors import SerializationError
from farcall.serialization import callable_name, callables, encode_function, resolve_function

HERE = __name__


def train() -> str:
    return "trained"


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return "logged", function(*args)

    return wrapper


@logged
def decorated() -> str:
    return "decorated"


@functools.lru_cache
def cached() -> str:
    return "cached"


class Model:
    def step(self) -> str:
        return "step"

    @staticmethod
    def load() -> str:
        return "loaded"

    @classmethod
    def create(cls) -> Model:
        return cls()

    class Part:
        @staticmethod
        def deep() -> str:
            return "deep"


class Adder:
    def __call__(self, x: int) -> int:
        return x + 1


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError

    def __call__(self) -> None: ...


def blob(path: str) -> bytes:
    return f"{HERE}\0{path}".encode()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the test's own, to be changed at will."""
    made = ModuleType("passing_module")
    exec("def work(): return 1", vars(made))
    monkeypatch.setitem(sys.modules, "passing_module", made)
    return made


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (train, blob("train")),
        (decorated, blob("decorated")),
        (cached, blob("cached")),
        (Model, blob("Model")),
        (Model.step, blob("Model.step")),
        (Model.load, blob("Model.load")),
        (Model.Part.deep, blob("Model.Part.deep")),
        (len, b"builtins\0len"),
        (int, b"builtins\0int"),
        (math.sqrt, b"math\0sqrt"),
        (os.path.join, b"posixpath\0join"),
        (collections.OrderedDict, b"collections\0OrderedDict"),
    ],
)
def test_what_has_a_name_travels_by_it(function: Any, name: bytes) -> None:
    for _ in range(2):  # the second time from what was kept
        assert encode_function(function) == name
        assert resolve_function(name) is function


def local_function() -> Any:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    "function",
    [
        lambda: 0,
        local_function(),
        Model().step,
        Model.create,
        functools.partial(train),
        Adder(),
        [].append,
        "".join,
        list[int],
        5,
    ],
    ids=lambda function: type(function).__name__,
)
def test_what_has_no_name_travels_by_value(function: Any) -> None:
    for _ in range(2):
        assert encode_function(function) is None


def test_names_that_are_no_text_are_no_names(module: ModuleType) -> None:
    module.work.__qualname__ = "lone \ud800"
    setattr(module, "lone \ud800", module.work)
    assert encode_function(module.work) is None
    adder = Adder()
    adder.__qualname__ = 5  # type: ignore[attr-defined]
    assert encode_function(adder) is None


def test_a_function_that_was_replaced_under_its_name_travels_by_value(module: ModuleType) -> None:
    work = module.work
    assert encode_function(work) == b"passing_module\0work"
    module.work = lambda: 2  # type: ignore[attr-defined]
    assert encode_function(work) is None
    module.work = work  # type: ignore[attr-defined]
    assert encode_function(work) == b"passing_module\0work"
    del module.work
    assert encode_function(work) is None


def test_a_function_of_a_module_that_is_gone_travels_by_value(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert encode_function(module.work) is not None
    monkeypatch.delitem(sys.modules, "passing_module")
    assert encode_function(module.work) is None


def test_a_patched_function_is_found_anew_at_each_call(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    name = b"passing_module\0work"
    assert resolve_function(name)() == 1
    module.work = lambda: 2  # type: ignore[attr-defined]
    assert resolve_function(name)() == 2
    again = ModuleType("passing_module")
    again.work = lambda: 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "passing_module", again)
    assert resolve_function(name)() == 3
    del again.work  # type: ignore[attr-defined]
    with pytest.raises(SerializationError):
        resolve_function(name)


def test_an_id_that_is_used_again_does_no_harm(module: ModuleType) -> None:
    assert encode_function(module.work) is not None
    callables._encoded[id(train)] = callables._encoded[id(module.work)]
    assert encode_function(train) == blob("train")
    function = lambda: 0  # noqa: E731
    callables._encoded[id(function)] = callables._encoded[id(module.work)]
    assert encode_function(function) is None


def test_nothing_is_kept_alive(module: ModuleType) -> None:
    encode_function(module.work)
    resolve_function(b"passing_module\0work")
    work = weakref.ref(module.work)
    del module.work
    assert work() is None


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    monkeypatch.setattr(callables, "_MAX_NAMES", 3)
    for number in range(10):
        exec(f"def work{number}(): pass", vars(module))
        name = encode_function(getattr(module, f"work{number}"))
        assert name is not None
        assert resolve_function(name) is getattr(module, f"work{number}")
    assert len(callables._encoded) <= 3
    assert len(callables._names) <= 3


def test_a_module_is_imported_if_need_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fresh_module.py").write_text("def work(): return 'fresh'\n")
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.setattr(callables, "_names", {})  # what other tests looked up
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fresh_module", raising=False)
    assert resolve_function(b"fresh_module\0work")() == "fresh"
    monkeypatch.delitem(sys.modules, "fresh_module")
    with pytest.raises(SerializationError, match=r"cannot import module `broken_module` .*ZeroDivisionError"):
        resolve_function(b"broken_module\0work")


def test_a_missing_function_says_who_lacks_what() -> None:
    with pytest.raises(SerializationError) as caught:
        resolve_function(blob("absent"), "worker2")
    assert str(caught.value) == (
        f"worker 'worker2' has no function `absent` in module `{HERE}`: is the same code installed there? The "
        "function was sent by its name: the RPC pickler does not serialize the code of a module's functions"
    )
    with pytest.raises(SerializationError) as caught:
        resolve_function(b"absent_module\0train", "worker2")
    assert str(caught.value) == (
        "worker 'worker2' cannot import module `absent_module` for its function `train` "
        "(ModuleNotFoundError: No module named 'absent_module'): is the same code installed there?"
    )
    with pytest.raises(SerializationError, match=r"this worker has no function `Model.absent` in"):
        resolve_function(blob("Model.absent"))


@pytest.mark.parametrize("garbage", [b"", b"\0", b"os", b"os\0", b"os\0path..join", b"\xff\0x", b"\0x", b".\0x"])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(SerializationError):
        resolve_function(garbage)


def test_a_scripts_function_is_found_in_the_receivers_script(become: Any) -> None:
    for sender, receiver in [(False, False), (False, True), (True, False), (True, True)]:
        name = encode_function(become("def work(): pass", spawned=sender).work)
        assert name == b"__main__\0work"
        there = become("def work(): pass", spawned=receiver)
        assert resolve_function(name) is there.work
        assert resolve_function(b"__mp_main__\0work") is there.work


def test_an_interactive_function_travels_by_value(become: Any) -> None:
    main = become("def work(): pass", interactive=True)
    assert encode_function(main.work) is None
    assert encode_function(train) == blob("train")


def test_another_script_says_so(become: Any) -> None:
    become("")
    advice = "define it at the top level of the script, before init_rpc, on every worker, or pass a lambda. The"
    with pytest.raises(SerializationError, match=f"`work` in module `__main__`: {advice}"):
        resolve_function(b"__main__\0work")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, become: Any) -> Iterator[ModuleType]:
    """This process runs the script server.py, which others import."""
    (tmp_path / "server.py").write_text("def put(): pass\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "server.py").write_text("def put(): pass\n")
    monkeypatch.setattr(callables, "_names", {})  # what other tests looked up
    monkeypatch.syspath_prepend(tmp_path)
    main: ModuleType = become("def put(): pass")
    main.__file__ = str(tmp_path / "server.py")
    yield main
    for name in ("server", "other.server", "other", "package.server"):
        sys.modules.pop(name, None)


def test_the_script_under_its_modules_name_is_the_script_that_runs(server: ModuleType) -> None:
    for _ in range(2):
        assert resolve_function(b"server\0put") is server.put
    assert sys.modules["server"] is server, "pickle finds the classes of the script"


def test_a_copy_of_the_script_that_was_imported_before_does_not_count(server: ModuleType) -> None:
    copy = importlib.import_module("server")
    assert resolve_function(b"server\0put") is server.put is not copy.put
    assert sys.modules["server"] is copy


def test_a_script_run_by_its_modules_name_is_known_by_it(server: ModuleType) -> None:
    server.__spec__ = ModuleSpec("package.server", None)
    assert resolve_function(b"package.server\0put") is server.put
    assert resolve_function(b"server\0put") is not server.put


def test_another_file_of_the_same_name_is_another_module(server: ModuleType) -> None:
    assert resolve_function(b"other.server\0put") is not server.put
    server.__file__ = str(Path(server.__file__ or "").with_name("gone") / "server.py")
    assert resolve_function(b"server\0put") is not server.put


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (train, "train"),
        ("train", "train"),
        (decorated, "decorated"),
        (Model, "Model"),
        (Model().step, "Model.step"),
        (Model.step, "Model.step"),
        (Model.create, "Model.create"),
        (Model.Part.deep, "Model.Part.deep"),
        (lambda: 0, "<lambda>"),
        (local_function(), "inner"),
        (functools.partial(functools.partial(train)), "partial(train)"),
        (functools.partial(Adder()), "partial(Adder.__call__)"),
        (Adder(), "Adder.__call__"),
        (len, "len"),
        ([].append, "list.append"),
        (str.upper, "str.upper"),
        (5, "int.__call__"),
    ],
)
def test_names_for_people(function: Any, name: str) -> None:
    assert callable_name(function) == name


def test_a_hostile_object_has_no_name() -> None:
    assert encode_function(Hostile()) is None
    assert callable_name(Hostile()) == "unnamed function"
