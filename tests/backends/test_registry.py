"""Backends by name: the namespace, registering, packages that bring one, and which is chosen."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import farcall as rpc
from backends.in_process import BACKEND, InProcessOptions
from farcall.backends import registry
from farcall.backends.registry import (
    BackendType,
    BackendValue,
    backend_registered,
    choose_backend,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
    unregister_backend,
)
from farcall.errors import BackendError, UsageError
from farcall.options import BackendOptions, RpcBackendOptions


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    known = dict(registry._known)
    for name in known:  # what other tests have imported is not looked at here
        if known[name] is not BackendType.FARCALL:
            del registry._known[name]
    yield
    registry._known.clear()
    registry._known.update(known)


def never(**_: object) -> Any:
    raise AssertionError("not to be called")


# -- the namespace


def test_the_default_has_torchs_name_too() -> None:
    assert BackendType.TENSORPIPE is BackendType.FARCALL
    assert repr(BackendType.FARCALL) == "BackendType.FARCALL"
    assert BackendType.FARCALL.name == "FARCALL"
    assert repr(BackendType) == "<BackendType: FARCALL, TENSORPIPE>"


def test_it_is_a_namespace_a_mapping_and_a_type() -> None:
    mine = register_backend("MINE", *BACKEND)
    assert BackendType.MINE is BackendType["MINE"] is mine
    assert mine.value == BACKEND
    assert isinstance(mine, BackendType)
    assert "MINE" in BackendType
    assert mine in BackendType
    assert "YOURS" not in BackendType
    assert list(BackendType) == [BackendType.FARCALL, mine]
    assert len(BackendType) == 2
    assert dict(BackendType.__members__) == {
        "FARCALL": BackendType.FARCALL,
        "TENSORPIPE": BackendType.FARCALL,
        "MINE": mine,
    }
    assert "MINE" in dir(BackendType)
    assert pickle.loads(pickle.dumps(mine)) is mine


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="there is no backend 'YOURS'; the backends are FARCALL, TENSORPIPE"):
        _ = BackendType.YOURS
    with pytest.raises(KeyError, match="YOURS"):
        _ = BackendType["YOURS"]
    assert not hasattr(BackendType, "YOURS")
    assert not hasattr(BackendType, "_private")


# -- registering


def test_registering_and_back() -> None:
    assert backend_registered("FARCALL")
    assert not backend_registered("MINE")
    register_backend("MINE", *BACKEND)
    assert backend_registered("MINE")
    with pytest.raises(RuntimeError, match=r"^RPC backend MINE: already registered"):
        register_backend("MINE", *BACKEND)
    unregister_backend("MINE")
    assert not backend_registered("MINE")
    with pytest.raises(UsageError, match="there is no backend 'MINE'; the backends are FARCALL"):
        unregister_backend("MINE")


@pytest.mark.parametrize("name", ["FARCALL", "TENSORPIPE"])
def test_the_default_stays(name: str) -> None:
    with pytest.raises(UsageError, match=f"the default backend, {name}, cannot be unregistered"):
        unregister_backend(name)
    with pytest.raises(UsageError, match=f"RPC backend {name}: already registered"):
        register_backend(name, *BACKEND)


@pytest.mark.parametrize("name", ["", "two words", "a-b", "_mine", "3", None, "name", "value"])
def test_what_cannot_be_a_name(name: Any) -> None:
    with pytest.raises(UsageError, match="cannot be a backend's name"):
        register_backend(name, *BACKEND)


def test_the_handlers_get_what_they_are_to_get() -> None:
    given: list[Any] = []

    def construct(*args: Any, **more: Any) -> BackendOptions:
        given.append((args, more))
        return BackendOptions()

    backend = register_backend("MINE", construct, never)
    construct_rpc_backend_options(backend)
    construct_rpc_backend_options(backend, 3, "tcp://h:1", colour="red")
    assert given == [((60.0, "env://"), {}), ((3, "tcp://h:1"), {"colour": "red"})]
    with pytest.raises(AssertionError, match="not to be called"):
        init_backend(backend, store=None)


@pytest.mark.parametrize(
    ("handlers", "role"),
    [((None, never), "construct_rpc_backend_options_handler"), ((BACKEND[0], 3), "init_backend_handler")],
)
def test_what_cannot_be_called_is_no_handler(handlers: Any, role: str) -> None:
    with pytest.raises(UsageError, match=f"the {role} of backend MINE must be a function, not (None|3)"):
        register_backend("MINE", *handlers)
    assert not backend_registered("MINE")


def test_a_handler_that_makes_no_options() -> None:
    backend = register_backend("MINE", lambda timeout, method: {}, never)  # type: ignore[arg-type,return-value]
    with pytest.raises(BackendError, match=r"BackendType.MINE returned \{\} instead of a farcall.BackendOptions"):
        construct_rpc_backend_options(backend)
    with pytest.raises(BackendError, match=r"instead of a farcall\.BackendOptions"):
        choose_backend(backend, None)


def test_options_of_another_backend_do_not_reach_the_handler() -> None:
    mine = register_backend("MINE", BACKEND[0], never)
    reason = r"`rpc_backend_options` must be a `InProcessOptions` \(backends\.in_process\) for BackendType.MINE"
    with pytest.raises(BackendError, match=reason):
        init_backend(mine, rpc_backend_options=RpcBackendOptions())
    with pytest.raises(BackendError, match=reason):
        init_backend(mine, None, "me", 0, 1, RpcBackendOptions())


def test_where_nobody_can_tell_the_type_of_the_options_the_handler_must() -> None:
    mine = register_backend("MINE", lambda timeout, method, *, colour: InProcessOptions(), never)
    with pytest.raises(AssertionError, match="not to be called"):
        init_backend(mine, rpc_backend_options=RpcBackendOptions())


# -- which one is chosen


def test_without_anything_it_is_the_default() -> None:
    backend, options = choose_backend(None, None)
    assert backend is BackendType.FARCALL
    assert options == RpcBackendOptions()


def test_a_backend_alone_gets_options_of_its_own() -> None:
    mine = register_backend("MINE", *BACKEND)
    assert choose_backend(mine, None) == (mine, InProcessOptions())


def test_options_alone_tell_the_backend() -> None:
    mine = register_backend("MINE", *BACKEND)
    assert choose_backend(None, RpcBackendOptions())[0] is BackendType.FARCALL
    assert choose_backend(None, rpc.TensorPipeRpcBackendOptions())[0] is BackendType.TENSORPIPE
    assert choose_backend(None, InProcessOptions())[0] is mine


def test_the_most_special_type_of_options_decides() -> None:
    @dataclass(kw_only=True)
    class Special(RpcBackendOptions):
        colour: str = "red"

    assert choose_backend(None, Special())[0] is BackendType.FARCALL
    mine = register_backend("MINE", lambda timeout, method: Special(rpc_timeout=timeout, init_method=method), never)
    assert choose_backend(None, Special())[0] is mine
    assert choose_backend(None, RpcBackendOptions())[0] is BackendType.FARCALL


def test_options_that_are_of_no_backend() -> None:
    class Foreign(BackendOptions):
        pass

    register_backend("NEEDS_MORE", lambda timeout, method, *, colour: InProcessOptions(), never)
    with pytest.raises(TypeError, match=r"^Could not infer backend for options"):
        choose_backend(None, Foreign())
    assert choose_backend(BackendType.FARCALL, Foreign())[0] is BackendType.FARCALL


@pytest.mark.parametrize("wrong", ["TENSORPIPE", 3, BackendType])
def test_what_is_no_backend(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^Argument backend must be a member of BackendType"):
        choose_backend(wrong, None)


@pytest.mark.parametrize("wrong", [{}, {"init_method": "env://"}, RpcBackendOptions])
def test_what_are_no_options(wrong: Any) -> None:
    for backend in (None, BackendType.FARCALL):
        with pytest.raises(TypeError, match=r"^Argument rpc_backend_options must be an instance of RpcBackendOptions"):
            choose_backend(backend, wrong)


# -- packages that bring one


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installed: PIGEON, which is right, and others that are not."""
    (tmp_path / "pigeons.py").write_text(
        textwrap.dedent("""
        from backends.in_process import BACKEND, InProcessOptions
        from farcall.backends import BackendValue, register_backend
        class PigeonOptions(InProcessOptions): pass
        RIGHT = BackendValue(lambda timeout, method: PigeonOptions(), BACKEND.init_backend_handler)
        WRONG = 3
        """)
    )
    (tmp_path / "owls.py").write_text(
        "from backends.in_process import BACKEND\nfrom farcall.backends import register_backend\n"
        'OWL = register_backend("OWL", *BACKEND)\n'
    )
    information = tmp_path / "pigeons-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeons\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[farcall.backends]\nPIGEON = pigeons:RIGHT\nWRONG = pigeons:WRONG\nGONE = flown_away:RIGHT\nOWL = owls:OWL\n"
        "no-name = pigeons:RIGHT\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("pigeons", "owls"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("packages")
def test_a_package_is_imported_when_its_backend_is_asked_for() -> None:
    assert backend_registered("PIGEON")
    assert "PIGEON" in BackendType
    assert "PIGEON" in repr(BackendType)
    assert "pigeons" not in sys.modules
    assert BackendType.PIGEON.name == "PIGEON"
    assert "pigeons" in sys.modules
    assert BackendType.PIGEON in BackendType
    assert isinstance(BackendType.PIGEON.value, BackendValue)


@pytest.mark.usefixtures("packages")
def test_a_package_may_register_its_backend_itself() -> None:
    assert BackendType["OWL"].value == BACKEND


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("name", "reason"),
    [("WRONG", r"\(pigeons:WRONG\) names 3; it must name a"), ("GONE", "cannot be loaded: No module named")],
)
def test_a_package_that_is_wrong(name: str, reason: str) -> None:
    with pytest.raises(BackendError, match=f"backend '{name}' .*{reason}"):
        getattr(BackendType, name)


@pytest.mark.usefixtures("packages")
def test_options_tell_a_backend_that_nobody_has_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    import pigeons  # type: ignore[import-not-found]

    assert not any(backend.name == "PIGEON" for backend in BackendType)
    backend, _ = choose_backend(None, pigeons.PigeonOptions())
    assert backend.name == "PIGEON"
    assert "'GONE'" in caplog.text
    assert "'no-name'" in caplog.text  # what is wrong with others is said, and harms nothing


def test_importing_looks_for_no_packages() -> None:
    script = "import sys, farcall; farcall.BackendType.TENSORPIPE; print('importlib.metadata' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "False\n"
