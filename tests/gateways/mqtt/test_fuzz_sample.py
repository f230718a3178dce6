"""A small draw of what `make fuzz` tries on the packet cutter for as long as it is let."""

from hypothesis import given
from hypothesis import strategies as st

# The fuzz targets run as scripts, so they cannot live under a package of their own.
from ...fuzz.mqtt_packets import check  # noqa: TID252


@given(st.binary(max_size=200))
def test_whatever_is_sent_comes_out_the_same_however_it_is_cut(data: bytes) -> None:
    check(data)
