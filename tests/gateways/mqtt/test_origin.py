"""Who published a record and under which packet identifier: both come back from the log's one number."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.mqtt.origin import origin_of, packet_id_in, publisher, with_ids

packet_ids = st.lists(st.integers(1, 65_535))


@given(st.text(), packet_ids)
def test_client_and_identifiers_come_back(client_id: str, ids: list[int]) -> None:
    origin = origin_of(client_id)
    found = with_ids(origin, ids)
    assert [publisher(one) for one in found] == [origin] * len(ids)
    assert [packet_id_in(one) for one in found] == ids


@given(st.text())
def test_client_alone_has_no_identifier_and_fits_into_the_column(client_id: str) -> None:
    origin = origin_of(client_id)
    assert packet_id_in(origin) == 0
    assert publisher(origin) == origin
    assert 0 <= origin < 1 << 63
