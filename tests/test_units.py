"""Sizes read as they are written; how numbers are written is in tests/golden/python/units.txt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mesh_attention.units import format_size
from mesh_attention_lab.cli.options import parse_size


@given(st.integers(0, 1 << 40) | st.integers(0, 1 << 20).map((1 << 10).__mul__))
def test_a_size_reads_as_it_is_written(size: int) -> None:
    assert parse_size(format_size(size).replace(",", "")) == size
