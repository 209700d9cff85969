from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from pickle import PickleBuffer, loads
from typing import Any

import pytest

from farcall.errors import SerializationError
from farcall.serialization.by_value import dumps_by_value

SOURCE = """
state = "sender's"
def read(): return state
class Box:
    class Inner: pass
    @staticmethod
    def open(): return state
call_read = lambda: read()
replaced = read
def read(): return "another"
read, replaced = replaced, read
"""


def test_a_script_names_its_functions_and_classes(become: Any) -> None:
    sender = become(SOURCE)
    payload = dumps_by_value([sender.read, sender.Box, sender.Box.Inner, sender.Box.open], None)
    receiver = become(SOURCE)
    assert loads(payload) == [receiver.read, receiver.Box, receiver.Box.Inner, receiver.Box.open]


def test_what_a_script_cannot_name_goes_by_value_with_the_receivers_names_in_it(become: Any) -> None:
    sender = become(SOURCE)
    payload = dumps_by_value([sender.call_read, sender.replaced], None)
    receiver = become(SOURCE.replace("sender's", "receiver's"))
    call_read, replaced = loads(payload)
    assert call_read() == "receiver's"
    assert replaced() == "another"
    assert replaced is not receiver.replaced


def test_an_interactive_main_goes_by_value(become: Any) -> None:
    sender = become(SOURCE, interactive=True)
    payload = dumps_by_value([sender.read, sender.Box], None)
    become("")
    read, box = loads(payload)
    assert read() == "sender's"
    assert box.open() == "sender's"


@pytest.mark.parametrize("in_band", [True, False])
def test_buffers_are_offered(in_band: bool) -> None:
    offered: list[PickleBuffer] = []

    def callback(buffer: PickleBuffer) -> bool:
        offered.append(buffer)
        return in_band

    payload = dumps_by_value(PickleBuffer(b"some bytes"), callback)
    assert [bytes(buffer) for buffer in offered] == [b"some bytes"]
    assert (b"some bytes" in payload) is in_band


def test_cloudpickle_is_not_imported_before_there_is_need() -> None:
    program = (
        "import sys; from farcall.serialization import *\n"
        "__file__ = 'script.py'\n"
        "assert loads(dumps([1, print])[0]) == [1, print]\n"
        "assert 'cloudpickle' not in sys.modules\n"
        "assert loads(dumps(lambda: 5)[0])() == 5\n"
        "assert 'cloudpickle' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("mode", ["r", "w", "r+"])
def test_an_open_file_is_refused(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("text")
    with open(path, mode) as file, pytest.raises(TypeError, match="an open file cannot be sent"):
        dumps_by_value([file], None)


def test_the_output_of_the_process_is_that_of_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    assert loads(dumps_by_value([sys.stdout, sys.stderr], None)) == [sys.stdout, sys.stderr]


def test_bytecode_of_another_version_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = dumps_by_value([lambda: 5], None)
    assert loads(payload)[0]() == 5
    monkeypatch.setattr("farcall.serialization.by_value.BYTECODE_VERSION", "CPython 3.99")
    here = re.escape("CPython {}.{}".format(*sys.version_info))
    with pytest.raises(SerializationError, match=rf"compiled by {here}, and this worker runs CPython 3\.99\."):
        loads(payload)
