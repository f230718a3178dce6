"""Each kind reads what people write, gives it back, and refuses the rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kinds import (
    DAY_MS,
    GIB,
    KIB,
    MIB,
    Address,
    Choice,
    Count,
    FilePath,
    Flag,
    Kind,
    Listen,
    Milliseconds,
    Origins,
    Seconds,
    Share,
    Size,
    Text,
)

ANY_SIZE = Size(0)
ANY_DURATION = Milliseconds(0)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (64, 64),
        ("64", 64),
        ("64B", 64),
        ("64MiB", 64 * MIB),
        ("64 MiB", 64 * MIB),
        ("1.5GiB", GIB + 512 * MIB),
        ("0.1kB", 100),
        ("2KB", 2000),
        ("3TB", 3 * 10**12),
    ],
)
def test_size_is_bytes_or_a_number_with_a_unit(text: object, count: int) -> None:
    assert ANY_SIZE.read(text) == count


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [(100, 100), ("100", 100), ("100ms", 100), ("1.5s", 1500), ("2m", 120_000), ("1h", 3_600_000), ("7d", 7 * DAY_MS)],
)
def test_duration_is_milliseconds_or_a_number_with_a_unit(text: object, milliseconds: int) -> None:
    assert ANY_DURATION.read(text) == milliseconds


def test_plain_number_of_a_setting_in_seconds_is_seconds() -> None:
    assert Seconds(0, 60).read(30) == Seconds(0, 60).read("30s") == Seconds(0, 60).read("0.5m") == 30


@pytest.mark.parametrize("raw", ["", "x", "-1", "1.", ".5", "1e3", "64mib", "64 Mib/s", "٣", True, None, [], 1.5])
def test_size_refuses_what_is_not_a_whole_number_of_bytes(raw: object) -> None:
    with pytest.raises(ValueError):
        ANY_SIZE.read(raw)


@pytest.mark.parametrize("raw", ["1KiB", 1024, "4KiB"])
def test_range_includes_its_ends(raw: object) -> None:
    assert Size(KIB, 4 * KIB).read(raw) in (1024, 4096)


@pytest.mark.parametrize("raw", [1023, "4097B", "1GiB", 0])
def test_one_past_the_range_is_refused(raw: object) -> None:
    with pytest.raises(ValueError):
        Size(KIB, 4 * KIB).read(raw)


def test_unlimited_is_a_word_only_where_it_is_allowed() -> None:
    assert Size(1, unlimited=True).read("unlimited") is None
    with pytest.raises(ValueError):
        Size(1).read("unlimited")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:5672", Address("127.0.0.1", 5672)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]:1883", Address("::1", 1883)),
        ("0.0.0.0:65535", Address("0.0.0.0", 65535)),
        ("off", None),
    ],
)
def test_door_listens_on_host_and_port_or_is_off(text: str, address: Address | None) -> None:
    assert Listen().read(text) == address


@pytest.mark.parametrize("raw", ["", ":5672", "host", "host:", "host:x", "host:65536", "::1:5672", "h\n:1", "on", 5672])
def test_half_an_address_is_refused(raw: object) -> None:
    with pytest.raises(ValueError):
        Listen().read(raw)


@pytest.mark.parametrize("raw", [True, "1.0", 1.0, "-1", 11, "11", "", None])
def test_count_is_a_whole_number_in_its_range(raw: object) -> None:
    with pytest.raises(ValueError):
        Count(0, 10).read(raw)


@pytest.mark.parametrize("kind", [Text(), FilePath(), Choice(("a", "b"))], ids=str)
@pytest.mark.parametrize("raw", ["", 1, None, True, ["a"]])
def test_text_is_refused_when_it_is_empty_or_no_text(kind: Kind, raw: object) -> None:
    with pytest.raises(ValueError):
        kind.read(raw)


def test_count_without_limit_is_a_word_where_it_is_allowed() -> None:
    assert Count(0, 10, unlimited=True).read("unlimited") is None
    assert Count(0, 10, unlimited=True).show(None) == "unlimited"
    with pytest.raises(ValueError):
        Count(0, 10).read("unlimited")


@pytest.mark.parametrize(("raw", "flag"), [(True, True), (False, False), ("true", True), ("false", False)])
def test_flag_is_true_or_false(raw: object, flag: bool) -> None:
    assert Flag().read(raw) is flag
    assert Flag().read(Flag().show(flag)) is flag


@pytest.mark.parametrize("raw", [0, 1, "yes", "True", "", None])
def test_flag_is_nothing_else(raw: object) -> None:
    with pytest.raises(ValueError):
        Flag().read(raw)


@pytest.mark.parametrize(
    ("raw", "share"), [(0.6, 0.6), ("0.6", 0.6), ("60%", 0.6), ("62.5 %", 0.625), (1, 1.0), (0, 0)]
)
def test_share_is_a_fraction_or_a_percentage(raw: object, share: float) -> None:
    assert Share(0, 1).read(raw) == share
    assert Share(0, 1).read(Share(0, 1).show(share)) == share


@pytest.mark.parametrize("raw", [60, "101%", -0.1, True, "x", "0,6", 1e-12, "", None])
def test_share_outside_its_range_is_refused(raw: object) -> None:
    with pytest.raises(ValueError):
        Share(0, 1).read(raw)


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", ()),
        ("none", ()),
        ("any", ("any",)),
        ("https://app.example, http://10.0.0.7:3000,null", ("https://app.example", "http://10.0.0.7:3000", "null")),
    ],
)
def test_origins_are_what_browsers_call_so(text: str, origins: tuple[str, ...]) -> None:
    assert Origins().read(text) == origins
    assert Origins().read(Origins().show(origins)) == origins


@pytest.mark.parametrize("raw", ["app.example", "https://app.example/", "https://App.example", "a,,b", "*", 1, ["any"]])
def test_origin_that_no_browser_would_say_is_refused(raw: object) -> None:
    with pytest.raises(ValueError):
        Origins().read(raw)


def test_path_may_be_none_where_that_is_allowed() -> None:
    assert FilePath(maybe=True).read("none") is None
    assert FilePath(maybe=True).show(None) == "none"
    assert str(FilePath().read("none")) == "none"


@given(st.integers(0, 2**63))
def test_shown_size_reads_back_as_itself(count: int) -> None:
    assert ANY_SIZE.read(ANY_SIZE.show(count)) == count


@given(st.integers(0, 10**15))
def test_shown_duration_reads_back_as_itself(value_ms: int) -> None:
    assert ANY_DURATION.read(ANY_DURATION.show(value_ms)) == value_ms


@given(st.integers(0, 3600))
def test_shown_seconds_read_back_as_themselves(seconds: int) -> None:
    kind = Seconds(0, 3600)
    assert kind.read(kind.show(seconds)) == seconds


@given(st.ip_addresses(), st.integers(0, 65535))
def test_shown_address_reads_back_as_itself(host: object, port: int) -> None:
    address = Address(str(host), port)
    assert Listen().read(Listen().show(address)) == address


@pytest.mark.parametrize(
    "kind",
    [ANY_SIZE, ANY_DURATION, Seconds(0, 9), Count(0, 9), Listen(), Text(), FilePath(), Flag(), Share(0, 1), Origins()],
    ids=str,
)
@given(raw=st.one_of(st.text(max_size=20), st.integers(), st.floats(), st.booleans(), st.none()))
def test_whatever_comes_is_read_or_refused(kind: Kind, raw: object) -> None:
    try:
        kind.read(raw)
    except ValueError:
        assert kind.expected
