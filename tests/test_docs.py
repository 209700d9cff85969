"""What the documents say is run, and what they list is compared with the code.

The conventions, for README.md and docs/*.md:

- A `python` block whose first line is `# name.py` is a whole program. A `text` block that begins with `$ farcall ...`
  or `$ python ...` is a transcript: the command is run where the document's programs are, and what it prints must be
  what the block shows. `...` stands for anything, on a line of its own for any number of lines; the directory is shown
  as /home/you. Every program has a transcript.
- All other `python` blocks of a document run one after the other in one process, a worker called `worker1` that is
  alone in its group. `expression  # → repr` and `expression  # raises Type: beginning of the message` are checked.
- `sh` blocks are not run; their `farcall` commands must be understood and their make targets be there.
"""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import operator
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import farcall
from architecture.test_imports import MAY_IMPORT
from farcall.cli import main, run
from farcall.runtime.client import MAX_BACKLOG_BYTES
from farcall.testing import FaultyRpcBackendOptions
from farcall.testing.faulty_options import MESSAGES
from farcall.transports.large_frames import MAX_BUFFERS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MORE_DOCUMENTS = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "conformance" / "README.md",
    ROOT / "examples" / "README.md",
]
LIMIT = 40.0
"""Seconds after which a program that does not end fails its test."""

FENCE = re.compile(r"^```(\w*)$")
PROGRAM = re.compile(r"^# (\w+\.py)$")
RESULT = re.compile(r"^(\S.*?)  # → (.*)$", re.MULTILINE)
FAILURE = re.compile(r"^(\S.*?)  # raises (.*)$", re.MULTILINE)
CARETS = re.compile(r"^(\w+ \|)?\s+[~^]+$")  # they differ between versions of Python
LINK = re.compile(r"\]\(([^)\s]+)\)")

RUNNER = """
import sys

import farcall


def expect(value, wanted):
    if repr(value) != wanted:
        raise AssertionError(f"the document says {wanted}, but it is {value!r}")


def expect_error(call, wanted):
    try:
        value = call()
    except BaseException as error:
        if not f"{type(error).__name__}: {error}".startswith(wanted):
            raise AssertionError(f"the document says {wanted!r}") from error
    else:
        raise AssertionError(f"the document says {wanted!r}, but it gave {value!r}")


_source, _name, _meeting = sys.argv[1:]
farcall.init_rpc(
    "worker1", rank=0, world_size=1, rpc_backend_options=farcall.RpcBackendOptions(init_method=f"file://{_meeting}")
)
with open(_source, encoding="utf-8") as _file:
    exec(compile(_file.read(), _name, "exec"))
farcall.shutdown()
"""


class Block(NamedTuple):
    """A fenced block: its language, the number of its first line, its text."""

    language: str
    line: int
    text: str

    @property
    def program(self) -> str | None:
        """The name of the program that it is, if it is one."""
        match = PROGRAM.match(self.text.partition("\n")[0])
        return match[1] if self.language == "python" and match else None

    @property
    def is_transcript(self) -> bool:
        return self.language == "text" and self.text.startswith("$ ")


def blocks(document: Path) -> list[Block]:
    found: list[Block] = []
    inside: Block | None = None
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
        if inside is None:
            if line.startswith("```"):
                match = FENCE.match(line)
                assert match, f"{document.name}:{number}: a fence that is none: {line!r}"
                inside = Block(match[1], number + 1, "")
        elif line == "```":
            found.append(inside)
            inside = None
        else:
            inside = inside._replace(text=f"{inside.text}{line}\n")
    assert inside is None, f"{document.name}: the last block has no end"
    return found


def snippets(document: Path) -> str:
    """The small blocks as one source in which every line has the number that it has in the document."""
    source = ""
    for block in blocks(document):
        if block.language == "python" and block.program is None:
            source += "\n" * (block.line - 1 - source.count("\n")) + block.text
    source = RESULT.sub(lambda match: f"expect({match[1]}, {match[2]!r})", source)
    return FAILURE.sub(lambda match: f"expect_error(lambda: {match[1]}, {match[2]!r})", source)


def skip_without_torch(document: Path) -> None:
    """Some documents are about torch, which is an extra."""
    if "import torch" in document.read_text(encoding="utf-8"):
        pytest.importorskip("torch", reason="torch is not installed: pip install farcall[torch]")


def run_program(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "NO_COLOR": "1", "PYTHONWARNINGS": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=LIMIT,
    )


def as_pattern(shown: str) -> str:
    """A regular expression for what a transcript shows."""
    pattern = ""
    for line in shown.splitlines():
        line = line.rstrip()
        if line == "...":
            pattern += "(?:.*\n)*?"
        elif not CARETS.match(line):
            pattern += ".*?".join(map(re.escape, line.split("..."))) + "\n"
    return pattern


def normalized(output: str, directory: Path) -> str:
    lines = [line.rstrip() for line in output.replace(str(directory), "/home/you").splitlines()]
    return "".join(f"{line}\n" for line in lines if not CARETS.match(line))


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


TRANSCRIPTS = [
    pytest.param(document, block, id=f"{name_of(document)}:{block.line}")
    for document in DOCUMENTS
    for block in blocks(document)
    if block.is_transcript
]


@pytest.mark.parametrize(("document", "transcript"), TRANSCRIPTS)
def test_a_program_prints_what_its_transcript_shows(document: Path, transcript: Block, tmp_path: Path) -> None:
    skip_without_torch(document)
    for block in blocks(document):
        if block.program is not None:
            (tmp_path / block.program).write_text(block.text, encoding="utf-8")
    command_line, _, shown = transcript.text.partition("\n")
    match shlex.split(command_line.removeprefix("$ ")):
        case ["farcall", *arguments]:
            command = [sys.executable, "-m", "farcall", *arguments]
        case ["python", *arguments]:
            command = [sys.executable, *arguments]
        case other:
            pytest.fail(f"a transcript of {other}: only farcall and python can be run")
    result = run_program(command, tmp_path)
    output = normalized(result.stdout, tmp_path)
    assert re.fullmatch(as_pattern(shown), output), f"{command_line} printed\n{output}"
    assert result.returncode == 0


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if snippets(path)], ids=name_of)
def test_the_small_examples_of_a_document_do_what_it_says(document: Path, tmp_path: Path) -> None:
    skip_without_torch(document)
    (tmp_path / "runner.py").write_text(RUNNER, encoding="utf-8")
    (tmp_path / "snippets").write_text(snippets(document), encoding="utf-8")
    result = run_program(
        [sys.executable, "runner.py", "snippets", name_of(document), str(tmp_path / "meeting")], tmp_path
    )
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_all_examples_of_a_document_are_run(document: Path) -> None:
    found = blocks(document)
    assert {block.language for block in found} <= {"python", "text", "sh"}
    programs = [block.program for block in found if block.program is not None]
    assert len(programs) == len(set(programs))
    commands = [shlex.split(block.text.partition("\n")[0]) for block in found if block.is_transcript]
    assert [name for name in programs if not any(name in command for command in commands)] == []
    # A mark that is not understood would be a statement that nobody checks.
    unchecked = [line for line in snippets(document).splitlines() if re.search("# (→|raises) ", line)]
    assert unchecked == []


@pytest.mark.parametrize("document", [*DOCUMENTS, *MORE_DOCUMENTS], ids=name_of)
def test_the_commands_of_a_document_can_be_given(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in blocks(document):
        if block.language != "sh":
            continue
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["farcall"]:
                arguments = main.parse(words[1:])
                assert words[1] != "run" or arguments.workers > 0
            elif words[:1] == ["make"]:
                assert [word for word in words[1:] if "=" not in word and word not in targets] == [], line


@pytest.mark.parametrize("document", [*DOCUMENTS, *MORE_DOCUMENTS, ROOT / "benchmarks" / "README.md"], ids=name_of)
def test_the_links_of_a_document_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(document.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{name_of(document)}: {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(document)}: {link}"


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readmes_first_program_is_the_example_of_that_name() -> None:
    (shown,) = [block.text for block in blocks(ROOT / "README.md") if block.program == "first.py"]
    assert shown == "# first.py\n" + (ROOT / "examples" / "first.py").read_text(encoding="utf-8")


def test_the_readme_says_the_version() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Version {farcall.__version__}" in text


# -- What the documents list is all there is


def test_every_public_name_is_documented() -> None:
    names = (
        "calls.md",
        "starting.md",
        "backends.md",
        "groups.md",
        "security.md",
        "performance.md",
        "interceptors.md",
        "verbs.md",
        "many.md",
        "control.md",
        "web-services.md",
    )
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in names)
    assert [name for name in farcall.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_every_option_of_init_rpc_is_documented_with_its_default() -> None:
    rows = table_rows(ROOT / "docs" / "starting.md", "Options")
    names = [field.name for field in dataclasses.fields(farcall.RpcBackendOptions)]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(names)
    defaults = {name: value for name in names if (value := getattr(farcall.RpcBackendOptions(), name)) is not None}
    assert {name: rows[f"`{name}`"][-1] for name in defaults} == {
        name: as_shown(value) for name, value in defaults.items()
    }


def test_every_option_of_the_faulty_agent_is_documented() -> None:
    rows = table_rows(ROOT / "docs" / "testing.md", "The faulty agent")
    mine = {field.name for field in dataclasses.fields(FaultyRpcBackendOptions)}
    usual = {field.name for field in dataclasses.fields(farcall.RpcBackendOptions)}
    assert {name for name in mine - usual if f"`{name}`" in rows} == mine - usual
    assert rows["`num_fail_sends`"][-1] == as_shown(FaultyRpcBackendOptions().num_fail_sends)
    assert {name for name in MESSAGES if name.startswith(("PYTHON", "RREF"))} <= {row.strip("`") for row in rows}


def test_every_error_is_documented_with_what_else_it_is() -> None:
    rows = table_rows(ROOT / "docs" / "calls.md", "Exceptions")
    errors = {kind.__name__: kind for kind in vars(farcall.errors).values() if isinstance(kind, type)}
    assert {row.strip("`") for row in rows} >= set(errors)
    for name, kind in errors.items():
        for other in re.findall(r"`(\w+)`", rows[f"`{name}`"][0]):
            assert issubclass(kind, errors.get(other) or getattr(builtins, other)), name


def test_the_limits_are_those_of_the_code() -> None:
    rows = table_rows(ROOT / "docs" / "calls.md", "Limits")
    options = farcall.RpcBackendOptions()
    limits = (options.max_message_size, MAX_BUFFERS, options.max_head_size, MAX_BACKLOG_BYTES)
    said = [text for cells in rows.values() for text in re.findall(r"[\d,]+ (?:[MT]iB|buffers)", cells[0])]
    units = {"MiB": 1 << 20, "TiB": 1 << 40, "buffers": 1}
    assert [int(text.split()[0].replace(",", "")) * units[text.split()[1]] for text in said] == list(limits)


def test_the_readme_names_every_document() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## More")[2]
    named = {ROOT / link for link in LINK.findall(text)}
    assert {path for path in DOCUMENTS if path.parent.name == "docs"} <= named


def test_the_readme_names_what_is_there_and_what_it_needs() -> None:
    rows = table_rows(ROOT / "README.md", "Coming from torch.distributed.rpc")
    names = re.findall(r"`([\w.]+)`", rows["the same"][0] + rows["other names"][0])
    assert len(names) > 10
    for name in names:
        if not name.startswith("torch."):
            operator.attrgetter(name.removeprefix("farcall."))(farcall)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    needed = [re.split(r"\W", package)[0] for package in project["dependencies"]]
    assert len(needed) == 3
    assert "It needs three packages: " in text
    assert [package for package in needed if package not in text.partition("It needs three packages: ")[2][:200]] == []
    assert f"Python {project['requires-python'].removeprefix('>=')} or later" in text


def test_every_option_of_farcall_run_is_documented() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    run.configure(parser)
    rows = table_rows(ROOT / "docs" / "starting.md")
    options = [action for action in parser._actions if action.option_strings]
    assert len(options) > 5
    for action in options:
        row = rows[", ".join(f"`{option}`" for option in action.option_strings)]
        if action.default not in (None, False):
            assert row[-1] == as_shown(action.default)


def test_the_architecture_names_every_layer_and_every_module_of_the_core() -> None:
    (tree,) = [block.text for block in blocks(ROOT / "docs" / "architecture.md")]
    package = ROOT / "src" / "farcall"
    layers = {path.name + "/" if path.is_dir() else path.stem for path in package.iterdir()}
    core = {path.stem for name in ("protocol", "transports", "runtime") for path in (package / name).glob("*.py")}
    # An entry is a name, or several with commas between them, two or more blanks away from what is said of it.
    entries = re.findall(r"^ {2,4}(\S+(?:, \S+)*)(?: \.\.\.)?(?:  |$)", tree, re.MULTILINE)
    named = {name for entry in entries for name in entry.split(", ")}
    assert (layers | core) - {"__pycache__/", "py"} <= named
    folders = {f"{path.parent.name}/" for path in package.glob("*/*/__init__.py")}
    assert named <= layers | folders | {path.stem for path in package.glob("*/*.py")}


def test_the_architecture_shows_the_import_table_that_is_enforced() -> None:
    rows = table_rows(ROOT / "docs" / "architecture.md")
    shown = {layer: set(re.findall(r"`(\w+)`", rows[f"`{layer}`"][0])) for layer in MAY_IMPORT if f"`{layer}`" in rows}
    assert shown == MAY_IMPORT


def table_rows(document: Path, section: str = "") -> dict[str, list[str]]:
    """The rows of all tables, or of those in one section, by their first cell; of rows that begin alike, the first."""
    text = document.read_text(encoding="utf-8")
    if section:
        text = re.split(r"^## ", text.partition(f"\n## {section}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
        assert text, f"{document.name} has no section {section!r}"
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("|"):
            first, *rest = [cell.strip() for cell in line.strip("|").split("|")]
            rows.setdefault(first, rest)
    return rows


def as_shown(value: Any) -> str:
    """How a default stands in a table."""
    if type(value) is int:
        return str(value)
    return f"{value:g}" if isinstance(value, float) else f"`{value}`".replace("'", '"')


# -- The checks themselves bite


@pytest.mark.parametrize(
    ("shown", "output", "fits"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\nc\n", False),
        ("a\n", "a\nb\n", False),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nd\n", True),
        ("a\n...\nd\n", "a\nb\n", False),
        ("p50 ... µs\n", "p50 31 µs\n", True),
        ("p50 ... µs\n", "p50 31 ms\n", False),
        ("w |   f()\nw |   ^^^\n", "w |   f()\n", True),
    ],
)
def test_a_transcript_is_compared_line_by_line(shown: str, output: str, fits: bool) -> None:
    assert bool(re.fullmatch(as_pattern(shown), output)) is fits


@pytest.mark.parametrize("statement", ["1 + 1  # → 3", "1 + 1  # raises ValueError", "1 / 0  # raises ValueError"])
def test_a_small_example_that_is_wrong_is_found(statement: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.md").write_text(f"# Wrong\n\n```python\n{statement}\n```\n")
    (tmp_path / "runner.py").write_text(RUNNER)
    (tmp_path / "snippets").write_text(snippets(tmp_path / "wrong.md"))
    result = run_program([sys.executable, "runner.py", "snippets", "wrong.md", str(tmp_path / "meeting")], tmp_path)
    assert result.returncode == 1
    assert 'File "wrong.md", line 4' in result.stdout
    assert "AssertionError: the document says" in result.stdout
