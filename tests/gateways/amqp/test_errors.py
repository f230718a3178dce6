"""Reply codes: soft or hard, and what a client reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.errors import CorruptLog, DiskFull, OffsetOutOfRange, PeerError
from headrace.gateways.amqp.errors import (
    AmqpError,
    ChannelException,
    ConnectionException,
    ReplyCode,
    amqp_error,
    reply_to,
)


@pytest.mark.parametrize("code", [311, 312, 313, 403, 404, 405, 406])
def test_soft_codes_close_the_channel_only(code: int) -> None:
    error = amqp_error(ReplyCode(code), "why")
    assert isinstance(error, ChannelException)
    assert not error.hard


@pytest.mark.parametrize("code", [320, 402, 501, 502, 503, 504, 505, 506, 530, 540, 541])
def test_hard_codes_close_the_connection(code: int) -> None:
    error = amqp_error(ReplyCode(code), "why")
    assert isinstance(error, ConnectionException)
    assert error.hard


def test_a_soft_code_may_still_end_the_connection_when_raised_as_a_connection_exception() -> None:
    error = ConnectionException(ReplyCode.ACCESS_REFUSED, "Login was refused")
    assert error.hard
    assert error.reply_text == "ACCESS_REFUSED - Login was refused"


def test_every_exception_is_the_peers_fault() -> None:
    error = amqp_error(ReplyCode.NOT_FOUND, "no queue 'q' in vhost '/'", 60, 20)
    assert isinstance(error, PeerError)
    assert (error.code, error.class_id, error.method_id) == (404, 60, 20)
    assert error.reply_text == "NOT_FOUND - no queue 'q' in vhost '/'"
    assert str(error) == "404 NOT_FOUND - no queue 'q' in vhost '/' (60, 20)"


@given(st.text(max_size=400))
def test_reply_text_always_fits_a_short_string(text: str) -> None:
    encoded = amqp_error(ReplyCode.SYNTAX_ERROR, text).reply_text.encode()
    assert len(encoded) <= 255


def test_reply_text_is_cut_at_a_character() -> None:
    assert amqp_error(ReplyCode.NOT_FOUND, "é" * 200).reply_text.endswith("é")


def test_reply_text_survives_what_utf8_cannot_hold() -> None:
    assert amqp_error(ReplyCode.NOT_FOUND, "\udcff").reply_text == "NOT_FOUND - \\udcff"


def test_an_exception_can_be_laid_to_the_method_that_caused_it() -> None:
    error = amqp_error(ReplyCode.SYNTAX_ERROR, "bad table").during(50, 10)
    assert isinstance(error, ConnectionException)
    assert (error.code, error.text, error.class_id, error.method_id) == (502, "bad table", 50, 10)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DiskFull("no space"), 506),
        (CorruptLog("p", 1, 2, "hash"), 541),
        (OffsetOutOfRange(1, 2, 3), 406),
        (PeerError(1, "some other wire"), 541),
    ],
)
def test_our_families_map_to_one_code_each(error: PeerError, code: int) -> None:
    answer = reply_to(error, 60, 20)
    assert (answer.code, answer.class_id, answer.method_id) == (code, 60, 20)


def test_an_amqp_exception_is_answered_as_it_is() -> None:
    known = amqp_error(ReplyCode.NOT_FOUND, "x", 50, 10)
    assert reply_to(known, 60, 20) is known
    unlaid: AmqpError = amqp_error(ReplyCode.NOT_FOUND, "x")
    assert (reply_to(unlaid, 60, 20).class_id, reply_to(unlaid, 60, 20).method_id) == (60, 20)
