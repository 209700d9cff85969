"""Reports about references: what stands in them is what a person who looks for a leak needs."""

from __future__ import annotations

import dataclasses

import pytest

from farcall.agent.inventory import HeldReference, Inventory, OwnedReference

OWNED = OwnedReference("reference 0:1 owned by 1", "Policy", 2, ("w2", "w3", "w2"), "train.py:12")
HELD = HeldReference("reference 0:2 owned by 2", "w2", True, (), False, "train.py:20")


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        (OWNED, "reference 0:1 owned by 1 (Policy), held 2 here, 2 by 'w2', 1 by 'w3'; made at train.py:12"),
        (
            dataclasses.replace(OWNED, type="", handles=0, holders=("w2",)),
            "reference 0:1 owned by 1 (no value yet), held 1 by 'w2'; made at train.py:12",
        ),
        (
            dataclasses.replace(OWNED, holders=()),
            "reference 0:1 owned by 1 (Policy), held 2 here; made at train.py:12",
        ),
        (HELD, "reference 0:2 owned by 2, owned by 'w2', confirmed; made at train.py:20"),
        (
            dataclasses.replace(HELD, confirmed=False),
            "reference 0:2 owned by 2, owned by 'w2', not confirmed yet; made at train.py:20",
        ),
    ],
)
def test_what_is_shown(reference: OwnedReference | HeldReference, text: str) -> None:
    assert str(reference) == text


def test_a_handle_that_waits_for_its_children_says_so() -> None:
    """The program let it go, so it should not be told that a variable of its own is to blame."""
    assert str(dataclasses.replace(HELD, dropped=True, pending=("w3", "w4", "w3"))) == (
        "reference 0:2 owned by 2, owned by 'w2', confirmed, passed on 2 by 'w3', 1 by 'w4' that its owner does not "
        "know yet; dropped, but not given back yet"
    )


def test_an_inventory_has_one_line_for_each_and_a_head() -> None:
    lines = str(Inventory((OWNED, OWNED), (HELD,))).splitlines()
    assert lines == ["owns 2, holds 1", f"  {OWNED}", f"  {OWNED}", f"  {HELD}"]
    assert str(Inventory((), ())) == "owns 0, holds 0"
