"""Whatever bytes come, every decoder gives a message or one error of ours, and nobody gets in.

The targets are those of `make fuzz` (`tests/fuzz/targets.py`), here under Hypothesis, and with the corpus of inputs
that each found interesting.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.targets import CORPUS, TARGETS


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_bytes_that_are_nearly_right(name: str, data: st.DataObject) -> None:
    """A good input with some of its bytes changed, cut out or put in."""
    seed = bytearray(data.draw(st.sampled_from(CORPUS[name])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(seed)))
        seed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    TARGETS[name](bytes(seed))


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    assert CORPUS[name]
    for data in CORPUS[name]:
        TARGETS[name](data)
