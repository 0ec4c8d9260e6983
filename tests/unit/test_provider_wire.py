"""Reading an HTTP answer: complete, incomplete, too large, or none at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_tencentdb import wire


def test_whole_answer() -> None:
    """Status, lower-case headers and exactly the announced body."""
    answer = wire.parse(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\nokrest", ended=False)
    assert answer is not None
    assert (answer.status, answer.body, answer.headers["x-a"]) == (200, b"ok", "b")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\n\r\nno length, so it ends with the connection",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
def test_more_must_come(data: bytes) -> None:
    """An unfinished answer is no answer yet."""
    assert wire.parse(data, ended=False) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
def test_a_cut_answer_is_an_error(data: bytes) -> None:
    """A connection that closes within an answer never passes for a complete one."""
    with pytest.raises(ValueError, match="closed"):
        wire.parse(data, ended=True)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 abc\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "no valid length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n", "over 100"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101, "over 100"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFF\r\n", "over 100"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "broken chunk"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "over 100"),
        (b"x" * (wire.HEAD_LIMIT + 1), "over 65536"),
    ],
)
def test_what_is_no_answer(data: bytes, why: str) -> None:
    """Other protocols, lies about lengths and floods end the call."""
    with pytest.raises(ValueError, match=why):
        wire.parse(data, ended=False, limit=100)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=5))
def test_chunks_are_joined(chunks: list[bytes]) -> None:
    """A chunked body is the same body."""
    coded = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    answer = wire.parse(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded, ended=False)
    assert answer is not None
    assert answer.body == b"".join(chunks)


def test_informational_answers_are_passed_over() -> None:
    """100 Continue comes before the answer, it is not the answer."""
    answer = wire.parse(b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 204 N\r\n\r\n", ended=False)
    assert answer is not None
    assert (answer.status, answer.body) == (204, b"")


def test_request_bytes() -> None:
    """A request names host:port, closes its connection, and announces its body."""
    data = wire.request("POST", "/capture", "127.0.0.1:8420", {"Authorization": "Bearer k"}, b"{}")
    assert data.startswith(b"POST /capture HTTP/1.1\r\nHost: 127.0.0.1:8420\r\nConnection: close\r\n")
    assert data.endswith(b"Content-Length: 2\r\n\r\n{}")


def test_a_key_cannot_smuggle_a_header() -> None:
    """A line break in a key is refused, not sent."""
    with pytest.raises(ValueError, match="line break"):
        wire.request("GET", "/", "h:1", {"Authorization": "Bearer a\r\nX: y"}, None)
