"""Checks the models of the rings and of the lead with SPIN: `ring.pml` and `lead.pml`, whose heads say what they show.

The models must be free of errors, and SPIN must find each bug that is planted in them. `make model` runs this file. It
also checks the largest configuration (FARCALL_MODEL_LARGE), which takes 1.5 GB of memory and a minute.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOOLS = {"spin": "spin", "gcc": "gcc"}
"""The commands that are needed, and their Debian packages."""

pytestmark = [
    pytest.mark.timeout(580),
    *(
        pytest.mark.skipif(
            shutil.which(command) is None, reason=f"{command} is not installed; the Debian package is {package}"
        )
        for command, package in TOOLS.items()
    ),
]

MODELS = [
    ("ring", "CALLER"),
    ("ring", "CALLER CLOSES"),
    ("ring", "POLLER"),
    ("lead", "FRAMES_0=1"),
    ("lead", "FRAMES_0=1 RETIRES"),
]
"""The models, and the names that are defined for them."""
if os.environ.get("FARCALL_MODEL_LARGE"):
    MODELS.append(("lead", "FRAMES_0=2"))

PLANTED_BUGS = [
    ("ring", "CALLER FLAG_AFTER_LOOK"),
    ("ring", "POLLER FLAG_AFTER_LOOK"),
    ("ring", "CALLER NO_FENCE_OF_SLEEPER"),
    ("ring", "POLLER NO_FENCE_OF_SLEEPER"),
    ("ring", "CALLER LOOK_BEFORE_HEAD"),
    ("ring", "POLLER LOOK_BEFORE_HEAD"),
    ("ring", "POLLER HEAD_BEFORE_BYTES"),
    ("ring", "CALLER ASK_AFTER_LOOK"),
    ("ring", "CALLER NO_FENCE_OF_WAITING_WRITER"),
    ("ring", "CALLER NO_FENCE_OF_ROOM"),
    ("ring", "CALLER FUTEX_WITHOUT_COMPARISON"),
    ("ring", "CALLER CLOSES CLOSED_AFTER_WAKE_UP"),
    ("lead", "FRAMES_0=1 FLAG_AFTER_LOOK"),
    ("lead", "FRAMES_0=1 NO_LOOK_AFTER_ASLEEP"),
    ("lead", "FRAMES_0=2 NEVER_WAITS NO_LOOK_AFTER_RUNNING"),
    ("lead", "FRAMES_0=2 EVENT_READ_BEFORE_SLEEP"),
    ("lead", "FRAMES_0=2 LEAD_TAKEN_IN_TWO_STEPS"),
    ("lead", "FRAMES_0=2 LEADS_AFTER_ITS_JOB"),
    ("lead", "FRAMES_0=2 NO_SUCCESSOR"),
    ("lead", "FRAMES_0=3 NO_WAKE_UP_FOR_PLACE"),
    ("lead", "FRAMES_0=1 SUBMITS=1 LIMIT_CHECKED_WITHOUT_LOCK"),
]
"""The models, and the names that are defined for them. The last name plants a bug."""


def check(model: str, names: str, directory: Path, has_cycle_check: bool = False) -> tuple[int, str]:
    """Returns how many errors SPIN finds, and its report. With `has_cycle_check`, an endless execution is an error."""
    shutil.copy(HERE / f"{model}.pml", directory)
    definitions = [f"-D{name}" for name in names.split()]
    subprocess.run(["spin", *definitions, "-a", f"{model}.pml"], cwd=directory, check=True, timeout=60)
    mode = "-DNP" if has_cycle_check else "-DSAFETY"
    build = ["gcc", "-O1", "-w", mode, "-DMEMLIM=3000", "-o", "pan", "pan.c"]
    subprocess.run(build, cwd=directory, check=True, timeout=120)
    command = ["./pan", "-m100000", *(["-l"] if has_cycle_check else [])]
    report = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=500).stdout
    found = re.search(r"errors: (\d+)", report)
    assert found is not None, report
    for trouble in ("out of memory", "MEMLIM bound", "depth too small"):
        assert trouble not in report, report
    return int(found[1]), report


@pytest.mark.parametrize(("model", "names"), MODELS)
def test_a_model_has_no_error(model: str, names: str, tmp_path: Path) -> None:
    errors, report = check(model, names, tmp_path)
    assert errors == 0, report


@pytest.mark.parametrize(("model", "names"), [each for each in MODELS if "FRAMES_0=2" not in each[1]])
def test_every_execution_of_a_model_ends(model: str, names: str, tmp_path: Path) -> None:
    errors, report = check(model, names, tmp_path, has_cycle_check=True)
    assert errors == 0, report


@pytest.mark.parametrize(("model", "names"), PLANTED_BUGS)
def test_a_planted_bug_is_found(model: str, names: str, tmp_path: Path) -> None:
    source = (HERE / f"{model}.pml").read_text()
    assert re.search(rf"#ifn?def {names.split()[-1]}\b", source)
    errors, report = check(model, names, tmp_path)
    assert errors == 1, report
