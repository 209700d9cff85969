from __future__ import annotations

import pytest

from farcall.bench.effort import PARTS, QUICK, Effort, parse_counts, parse_parts, parse_sizes
from farcall.errors import UsageError


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("0", (0,)),
        ("64,0", (0, 64)),
        ("64B, 4KiB ,1mib", (64, 4096, 1 << 20)),
        ("1 KiB,1024", (1024,)),
        ("2GiB", (2 << 30,)),
    ],
)
def test_sizes_have_units_and_are_put_in_order(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "1,,2", "-1", "4KB", "big", "1.5MiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--sizes: '.*' is not a size; write sizes like 0,64,4KiB,1MiB"):
        parse_sizes(text)


def test_counts_are_numbers_from_1_in_order() -> None:
    assert parse_counts("--start", "8, 1,2,2") == (1, 2, 8)


@pytest.mark.parametrize("text", ["", "0", "1,0", "-1", "two", "1.5"])
def test_what_is_no_count_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(UsageError, match=r"--start: .* is not a whole number of at least 1"):
        parse_counts("--start", text)


def test_parts_are_taken_in_their_own_order() -> None:
    assert parse_parts("startup, payload") == ("payload", "startup")
    with pytest.raises(UsageError, match="'speed' does not exist; choose from payload, exchange, in-flight, threads, "):
        parse_parts("payload,speed")


def test_a_full_run_goes_from_nothing_to_256_mib_and_a_quick_one_says_that_it_is_one() -> None:
    full = Effort()
    assert (full.sizes[0], full.sizes[-1], full.parts, full.quick) == (0, 256 << 20, PARTS, False)
    assert QUICK.quick
    assert set(QUICK.sizes) < set(full.sizes)
