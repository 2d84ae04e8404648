"""Sizes, bytes, times and counts as people write and read them."""

from __future__ import annotations

import pytest

from mesh_attention.errors import ParseError
from mesh_attention.units import format_nbytes, format_size, format_time, format_together, parse_nbytes, parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("4096", 4096), ("128k", 131072), ("2M", 2097152), (" 1k ", 1024)]
)
def test_a_size_is_a_number_of_ones_of_k_or_of_m(text: str, size: int) -> None:
    assert parse_size("--seq", text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "1e6", "1 k", "1kk", "1g", "٣"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ParseError, match="expected a whole number such as 4096, 128k or 1m"):
        parse_size("--seq", text)


@pytest.mark.parametrize("size", [0, 1, 1000, 1024, 1536, 131072, 1048576, 100_000, 3 * 2**20 + 2**10])
def test_a_size_reads_as_it_is_written(size: int) -> None:
    assert parse_size("--seq", format_size(size).replace(",", "")) == size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (32 * 2**20, "32.0 MiB"),
        (2**40, "1.00 TiB"),
        (2**60, "1,048,576 TiB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


def test_a_column_has_one_unit_and_equally_many_decimals() -> None:
    units = (("", 1), ("thousand", 1000))
    assert format_together([5, 12_345, 99_000], units, below=1000) == ("thousand", ["0.01", "12.35", "99.00"])
    assert format_together([], units, below=1000) == ("", [])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0"),
        (-1e-17, "0"),
        (2.5e-7, "0.25 µs"),
        (1.234e-5, "12.3 µs"),
        (9.9996e-4, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (59.94, "59.9 s"),
        (119.0, "119 s"),
        (330.0, "5.5 min"),
        (600_000.0, "10,000 min"),
    ],
)
def test_times_read_as_people_say_them(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * 2**30),
        ("512MiB", 2**29),
        ("20g", 20 * 2**30),
        (" 1.5 gib ", 3 * 2**29),
        ("4k", 4096),
        ("1T", 2**40),
    ],
)
def test_memory_is_a_number_and_a_unit(text: str, nbytes: int) -> None:
    assert parse_nbytes("--memory", text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "20", "g", "-1g", "1e3g", "20GB", "20 gigabytes", "0g", "0.0000001k", "٣g", "1_0g"]
)
def test_anything_else_is_refused_as_memory(text: str) -> None:
    with pytest.raises(ParseError, match="expected bytes above 0 with a unit"):
        parse_nbytes("--memory", text)
