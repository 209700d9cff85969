"""`installation`: names of modules that somebody else imports lead to ours."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall.pytorch.installation import replace_when_imported


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "somebodys"
    package.mkdir()
    (package / "__init__.py").write_text("from .tool import answer\n")
    (package / "tool.py").write_text("raise ImportError('it must not be run')\n")
    (package / "other.py").write_text("answer = 'theirs'\n")
    (tmp_path / "replacement_of_it.py").write_text("answer = 'ours'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.startswith(("somebodys", "replacement_of_it"))]:
        del sys.modules[name]


@pytest.mark.usefixtures("theirs")
class TestSubstitutes:
    def test_nothing_is_imported_before_somebody_asks(self) -> None:
        replace_when_imported({"somebodys.tool": "replacement_of_it"})
        assert "replacement_of_it" not in sys.modules

    def test_whoever_imports_the_name_gets_ours(self) -> None:
        replace_when_imported({"somebodys.tool": "replacement_of_it"})
        package = importlib.import_module("somebodys")
        ours = sys.modules["replacement_of_it"]
        assert package.answer == "ours"
        assert package.tool is ours
        assert sys.modules["somebodys.tool"] is ours
        assert ours.__spec__ is not None
        assert (ours.__name__, ours.__spec__.name) == ("replacement_of_it", "replacement_of_it")

    def test_other_modules_of_the_package_are_theirs(self) -> None:
        replace_when_imported({"somebodys.tool": "replacement_of_it"})
        assert importlib.import_module("somebodys.other").answer == "theirs"

    def test_ours_failing_is_an_error_of_the_import_and_can_be_tried_again(self) -> None:
        replace_when_imported({"somebodys.tool": "no_such_module_of_ours"})
        for _ in range(2):
            with pytest.raises(ModuleNotFoundError, match="no_such_module_of_ours"):
                importlib.import_module("somebodys")
        assert "somebodys.tool" not in sys.modules

    def test_twice_is_once(self) -> None:
        before = len(sys.meta_path)
        replace_when_imported({"somebodys.tool": "replacement_of_it"})
        replace_when_imported({"somebodys.tool": "replacement_of_it"})
        assert len(sys.meta_path) == before + 1
