from __future__ import annotations

import pytest

from farcall.bench.tables import ABSENT, TextTable, in_bytes, in_time, number, three_digits

TABLE = TextTable("Speeds", ["system", "µs"], [["farcall", "1.0"], ["a", ABSENT]])


def test_a_table_is_markdown_or_plain_text() -> None:
    assert TABLE.markdown() == "**Speeds**\n\n| system | µs |\n| :--- | ---: |\n| farcall | 1.0 |\n| a | – |"
    assert TABLE.plain() == "Speeds\nsystem    µs\nfarcall  1.0\na          –"


def test_a_number_that_is_not_there_is_a_dash() -> None:
    assert (number(1234.5, ",.1f", " µs"), number(None, ",.1f", " µs")) == ("1,234.5 µs", ABSENT)


@pytest.mark.parametrize(
    ("value", "shown"), [(1234.5, "1,234"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123")]
)
def test_three_digits_count(value: float, shown: str) -> None:
    assert three_digits(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(2.5, "2.50 s"), (0.0125, "12.5 ms"), (31e-6, "31.0 µs"), (5e-7, "500 ns")]
)
def test_times_have_the_unit_that_suits_them(seconds: float, shown: str) -> None:
    assert in_time(seconds) == shown


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (64, "64 B"), (4096, "4 KiB"), (3 << 19, "1.5 MiB"), (256 << 20, "256 MiB")]
)
def test_sizes_have_the_unit_that_suits_them(size: int, shown: str) -> None:
    assert in_bytes(size) == shown
