"""Modules of tests that cannot be imported do not take the others with them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.stand_ins import tolerated

SOURCES = {
    "__init__": "",
    "good_test": "class GoodTest:\n    def test_it(self): pass\n",
    "bad_test": "class HalfTest:\n    def test_it(self): pass\nhelper = 1\nraise ImportError('no name RRef')\n",
    "leaning_test": "from torn.bad_test import helper\nclass LeaningTest: pass\n",
    "fixture": "raise ImportError('no fixture')\n",
    "all_of_it": "from torn.bad_test import BadTest, HalfTest\nfrom torn.good_test import GoodTest\n"
    "from torn.leaning_test import LeaningTest\n",
}  # fmt: skip


@pytest.fixture(autouse=True)
def torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "torn"
    package.mkdir()
    for name, source in SOURCES.items():
        (package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torn"]:
        del sys.modules[name]


def test_the_others_are_there_and_the_reasons_are_noted(capfd: pytest.CaptureFixture[str]) -> None:
    with tolerated("torn.") as reasons:
        module: Any = importlib.import_module("torn.all_of_it")
    assert hasattr(module.GoodTest, "test_it")
    assert module.BadTest.__module__ == module.HalfTest.__module__ == "torn.bad_test"
    assert not hasattr(module.HalfTest, "test_it")
    assert reasons["torn.bad_test"] == "torn.bad_test cannot be imported: ImportError: no name RRef"
    assert set(reasons) == {"torn.bad_test", "torn.leaning_test"}
    assert "line 4" in capfd.readouterr().err


def test_what_is_no_module_of_tests_fails_as_ever() -> None:
    with tolerated("torn.") as reasons, pytest.raises(ImportError, match="no fixture"):
        importlib.import_module("torn.fixture")
    assert reasons == {}


def test_outside_of_it_everything_fails_as_ever() -> None:
    before = list(sys.meta_path)
    with tolerated("torn."):
        pass
    assert sys.meta_path == before
    with pytest.raises(ImportError, match="no name RRef"):
        importlib.import_module("torn.bad_test")
